"""Training steps without the host: a step's kernels are recorded once as a CUDA graph and replayed.

A small model's step is a few hundred kernels of some microseconds each, which Python launches far more slowly than the GPU runs them. Here
all that a step reads lies on the device: the examples, which of them each step sees, the learning rates, and the number of the step;
what it measures is written to a table there. So a chunk of steps is one short loop of replays, and the host reads the table
when the chunk is done. The first step of each shape runs as it is, the second is recorded: the numbers are the same.
"""

import torch
from torch import nn

CHUNK = 100  # steps between two looks at the measures: the rows of the tables


class Graphs:
    """The steps of a Run on a CUDA device."""

    def __init__(self, run):
        self.run, device = run, run.device
        self.parts = [part.on(device) for part in run.train]
        self.order = torch.zeros(CHUNK, run.settings.batch, dtype=torch.int64, device=device)
        self.rates = torch.zeros(CHUNK, device=device)
        self.found = torch.zeros(CHUNK, len(run.task.measures[0]) + 1, dtype=torch.float64, device=device)
        self.rows = torch.arange(CHUNK, device=device)[:, None]
        self.row = torch.zeros(1, dtype=torch.int64, device=device)  # of the step in the tables
        self.rate = torch.zeros((), device=device)
        self.warm, self.graphs, self.pool, self.refused = set(), {}, None, None

    @staticmethod
    def fit(run):
        """Whether steps of this run may be recorded: their shapes and what they launch are the same each time."""
        masked = run.task.kind.pad >= 0 or run.plain.has_trees  # packed by the host
        return run.device.type == "cuda" and run.world == 1 and run.settings.graph and not run.settings.compile and not masked

    def body(self, part):
        run = self.run
        index = self.order.index_select(0, self.row)[0]
        self.rate.copy_(self.rates.index_select(0, self.row)[0])
        sums, count = run.losses(part.take(index))
        norm = nn.utils.clip_grad_norm_(run.plain.parameters(), run.clip)
        run.optimizer.step()
        run.optimizer.zero_grad()
        self.found.copy_(torch.where(self.rows == self.row, torch.cat([sums / count, norm.double()[None]]), self.found))
        self.row += 1

    def record(self, part):
        """The graph of a step on this part; what cannot be recorded is said once, and runs as it is."""
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: what other threads of the process do meanwhile is their own affair.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                self.body(part)
            finally:
                graph.capture_end()
        except RuntimeError as problem:
            self.refused = str(problem).splitlines()[0]
            self.run.optimizer.zero_grad()
            self.run.say(f"steps are not recorded: {self.refused}")
            return None
        self.pool = graph.pool()
        return graph

    def step(self, number):
        part = self.parts[number]
        if number in self.warm and number not in self.graphs and not self.refused:
            self.graphs[number] = self.record(part)
        self.warm.add(number)
        if graph := self.graphs.get(number):
            graph.replay()
        else:
            self.body(part)

    def steps(self, first, last):
        """Measures and norms of these steps; None as long as the device works on them."""
        for group in self.run.optimizer.param_groups:
            group["lr"] = self.rate
        for begin in range(first, last, CHUNK):
            count = min(CHUNK, last - begin)
            seen = [self.run.train.rows(step) for step in range(begin, begin + count)]
            self.order[:count] = torch.stack([index for _, index in seen]).to(self.order.device)
            self.rates[:count] = torch.tensor([self.run.rate(step) for step in range(begin, begin + count)]).to(self.rates.device)
            self.row.zero_()
            made = len(self.graphs)
            for number, _ in seen:
                self.step(number)
            if len(self.graphs) > made:
                torch.cuda.empty_cache()  # what the first steps had is of no use to the graphs, which have a pool of their own
            if self.run.stream:
                done = self.run.stream.record_event()
                while not done.query():
                    yield None
            yield from self.found[:count].tolist()
