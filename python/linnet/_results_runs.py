"""How linnet.results runs what it needs: one run after the other, or many beside each other on a GPU.

A small model leaves most of a GPU idle, however fast its steps follow one another. So several processes (--jobs) hold several runs each
(--beside), every run on a stream of its own with its steps recorded as graphs; the runs of a process take turns on the host.
"""

import dataclasses
import json
import math
import multiprocessing
import pathlib
import queue
import time

import torch

from ._comparisons import COMPARISONS
from .train import Run, Settings, training


@dataclasses.dataclass(frozen=True)
class Request:
    """A run that a comparison wants."""

    comparison: str
    column: str
    label: str
    rate: float
    seed: int
    folder: str
    settings: Settings = dataclasses.field(compare=False)


def running(request, say, tasks, deadline=math.inf):
    """The result of a run as a generator that gives way while a GPU is busy: trained, or found finished in its folder. A run whose loss is no
    number any more has no score. `tasks` keeps the data that runs share."""
    settings, folder, measure = request.settings, pathlib.Path(request.folder), COMPARISONS[request.comparison].measure
    path, kept = folder / "result.json", folder / "settings.json"
    if path.exists() and json.loads(kept.read_text()) == dataclasses.asdict(settings):
        result = json.loads(path.read_text())
        if "planned_steps" not in result and (measure is None or "beside" in result):
            return result
    if time.monotonic() >= deadline:
        return None
    say(f"{request.column}, {request.label}, lr {request.rate:g}, seed {request.seed}")
    key = repr([getattr(settings, name) for name in ("task", "task_options", "eval_options", "examples", "eval_examples", "seed")])
    try:
        if key not in tasks:
            tasks[key] = Run.task_of(settings)
        run = Run(settings, folder, tasks[key])
        work, result = training(run, say, deadline), None
        while result is None:
            try:
                with run.on_stream():
                    next(work)
            except StopIteration as end:
                result = end.value
            yield
        if measure and time.monotonic() < deadline:
            with run.on_stream():
                result["beside"] = measure(run)
    except ArithmeticError as problem:
        say(str(problem))
        result = {"score": None, "diverged": str(problem)}
        folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    return result


def alone(say, deadline):
    """Takes lists of requests and gives (request, result), one run after the other in this process."""
    waiting, tasks = list((yield) or []), {}
    while waiting:
        request = waiting.pop(0)
        work = running(request, say, tasks, deadline)
        while True:
            try:
                next(work)
            except StopIteration as end:
                result = end.value
                break
        waiting += (yield request, result) or []


def serve(inbox, outbox, beside, deadline):
    """A process that trains: takes requests from the inbox, holds up to `beside` runs at a time, gives (request, result, what was said)."""
    tasks, open_runs, closed = {}, [], False
    while not closed or open_runs:
        while not closed and len(open_runs) < beside:
            try:
                request = inbox.get(block=not open_runs)
            except queue.Empty:
                break
            closed = request is None
            if not closed:
                lines = []
                open_runs.append((request, running(request, lines.append, tasks, deadline), lines))
        for each in list(open_runs):
            request, work, lines = each
            try:
                next(work)
                continue
            except StopIteration as end:
                outbox.put((request, end.value, lines, None))
            except (ValueError, TypeError, OSError, RuntimeError) as problem:
                outbox.put((request, None, lines, f"{type(problem).__name__}: {problem}"))
            open_runs.remove(each)
            del work, each
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # another run has other streams, which cannot use what this one's left
        time.sleep(2e-4)


def side_by_side(jobs, beside, say, deadline):
    """Takes lists of requests and gives (request, result) as they end, in so many processes with so many runs each."""
    context = multiprocessing.get_context("spawn")  # a process that has touched a GPU cannot be forked
    inbox, outbox = context.Queue(), context.Queue()
    workers = [context.Process(target=serve, args=(inbox, outbox, beside, deadline), daemon=True) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    try:
        waiting = 0
        ready = (yield) or []
        while True:
            for request in ready:
                inbox.put(request)
                waiting += 1
            if not waiting:
                return
            while True:
                try:
                    request, result, lines, problem = outbox.get(timeout=1)
                    break
                except queue.Empty:
                    if not all(worker.is_alive() for worker in workers):
                        raise RuntimeError("a process that trains has ended; what it had finished is kept") from None
            waiting -= 1
            where = f"{request.column}, {request.label}, lr {request.rate:g}, seed {request.seed}"
            say(where + ": " + (problem or (lines[-1] if lines else "found finished" if result else "not run: the deadline")))
            ready = (yield request, result) or []
    finally:
        for _ in workers:
            inbox.put(None)
        for worker in workers:
            worker.join(timeout=20)
            if worker.is_alive():
                worker.kill()
