"""The other side of src/bench/peer.h: runs what a user would take instead, and says how long each call took.

`linnet bench --peers` starts this text with a socket's number and a thread count. Each mechanism adds functions in
src/mechanisms/<mechanism>/<mechanism>_peer.py: a function with the operator's name (for tensors on a GPU: that name and _gpu, if
there is one) takes a Case and returns (name, call), or None where no peer offers the case; `call` does the work once, and may
return its seconds where it knows them better than this clock. What a user should know, a package that is missing, goes to
`notes`. Those files stand behind this one, and a last line calls serve().
"""

import json
import socket
import sys
import time

try:
    import torch
except ImportError as error:
    torch, why_not = None, str(error)


notes = []  # sentences for the user, with the next answer


class Case:
    """One case: letters (case["T"]), options (case.options), dtype, and whether gradients are wanted."""

    def __init__(self, message):
        self.op = message["op"]
        self.letters = message["letters"]
        self.options = message["options"]
        self.lengths = message["lengths"]  # values of the tensors that count tokens
        self.dtype = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[message["dtype"]]
        self.backward = message["pass"] != "fwd"
        self.device = message.get("device", "cpu")
        self.other = message.get("other", [])  # inputs that have the second of their two shapes

    def __getitem__(self, letter):
        return self.letters[letter]

    def random(self, shape, dtype=None):
        """Normal numbers of a shape in letters: case.random("B H T K")."""
        size = [self.letters[letter] for letter in shape.split()]
        return torch.randn(size, device=self.device).to(dtype or self.dtype)

    def default(self, *names):
        """Whether these options all have the values that switch them off."""
        off = {"window": "-1,-1", "softcap": "0", "prefix": "0", "chunk": "0", "scale": "none", "bias": ""}
        return all(self.options.get(name, off[name]) == off[name] for name in names)

    def work(self, function, *tensors):
        """function(*tensors) once, or once forward and once backward when the case asks for gradients."""
        if not self.backward:
            def forward():
                with torch.no_grad():
                    return function(*tensors)
            return forward
        leaves = [tensor.requires_grad_() for tensor in tensors]
        with torch.no_grad():
            gradient = torch.randn_like(function(*leaves))

        def both():
            for leaf in leaves:
                leaf.grad = None
            out = function(*leaves)
            out.backward(gradient)
            return out
        return both


def fastest(calls):
    """Of several (name, call), the one whose better time of two is least."""
    def time_of(call):
        call()  # compiles and tunes, where there is something to
        best = float("inf")
        for _ in range(2):
            finish()
            start = time.perf_counter()
            call()
            finish()
            best = min(best, time.perf_counter() - start)
        return best
    return min(calls, key=lambda named: time_of(named[1]))


def finish():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def gpu_round(call, seconds):
    """Times of calls enqueued one behind the other, a moment taken between them; short ones share a moment, as ours do."""
    def batch(calls):
        moments = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
        moments[0].record()
        for moment in moments[1:]:
            for _ in range(calls):
                call()
            moment.record()
        torch.cuda.synchronize()
        return [earlier.elapsed_time(later) / 1e3 / calls for earlier, later in zip(moments[1:], moments[2:])]

    shortest = min(batch(1))
    calls = 16 if 16 * shortest < 1e-4 else int(1e-4 / shortest) + 1
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        times += batch(calls)
    return times


def serve(channel, threads):
    stream = socket.socket(fileno=channel).makefile("rw")

    def answer(**message):
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    if torch is None:
        return answer(error=why_not)
    torch.set_num_threads(threads)
    answer(version="torch " + torch.__version__)
    call = None
    for line in stream:
        message = json.loads(line)
        try:
            if "open" in message:
                torch.manual_seed(1)
                call = None  # the case before lets go of its memory
                case = Case(message["open"])
                function = globals().get(case.op + "_gpu") if case.device == "cuda" else None
                function = function or globals().get(case.op)
                named = function(case) if function is not None else None
                if named is not None:
                    call = named[1]
                    if message.get("warm", True):
                        call()
                    if case.device == "cuda":
                        finish()
                answer(name=named[0] if named is not None else "", notes=notes)
                notes.clear()
            elif case.device == "cuda":
                answer(seconds=gpu_round(call, message["round"]))
            else:
                seconds, end = [], time.perf_counter() + message["round"]
                while not seconds or time.perf_counter() < end:
                    start = time.perf_counter()
                    told = call()
                    seconds.append(told if isinstance(told, float) else time.perf_counter() - start)
                answer(seconds=seconds)
        except Exception as error:
            why = f"{case.op}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if "open" not in message:
                answer(error=why)
                continue
            print("peer of " + why, file=sys.stderr)  # a case without a peer; the next one may do better
            answer(name="")
