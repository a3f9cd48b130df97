"""The thread that drives a scheduler; every other thread only leaves messages for it."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Sequence

from trtllm_shadowkv.errors import RequestError, StateError
from trtllm_shadowkv.runtime.scheduler import Scheduler, Usage
from trtllm_shadowkv.runtime.sequence import Answer

_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _wait_for_threads() -> None:
    """Threads that were told to end may still be freeing an engine, which the end of the interpreter must not cut off.

    Registered first, so it runs last: those that were not told yet have been by then.
    """
    for thread in list(_threads):
        if thread.is_alive():  # not in a process that was forked from theirs
            thread.join()


class Worker:
    """Runs ``scheduler.step()`` while there is work.

    Args:
        scheduler: from now on this thread's own.
        max_queue: answers that may wait; more are refused.
    """

    def __init__(self, scheduler: Scheduler, max_queue: int) -> None:
        self._scheduler = scheduler
        self._max_queue = max_queue
        self._changed = threading.Condition()
        self._arrived: list[Answer] = []
        self._stopping = False
        # A daemon, so that a program that ends without close() is not held up by an unfinished request: it is stopped
        # and waited for when the interpreter exits.
        self._thread = threading.Thread(target=self._run, name="trtllm_shadowkv", daemon=True)
        atexit.register(self.stop)
        _threads.add(self._thread)
        self._thread.start()

    def submit(self, answers: Sequence[Answer]) -> None:
        """Queue answers, all or none.

        Raises:
            RequestError: the queue is full.
            StateError: the worker was stopped, or belongs to the process that this one was forked from.
        """
        if not self._thread.is_alive():
            raise StateError("the LLM is closed, or was opened by the parent process", todo="open another one")
        with self._changed:
            if self._stopping:
                raise StateError("the LLM is closed", todo="open another one")
            waiting = len(self._scheduler.waiting) + len(self._arrived)
            if waiting + len(answers) > self._max_queue:
                raise RequestError(
                    f"{waiting} answers wait and {len(answers)} more were asked for",
                    f"at most {self._max_queue} waiting (max_queue)",
                    "try again later",
                )
            self._arrived += answers
            self._changed.notify()

    def usage(self) -> Usage:
        return self._scheduler.usage(len(self._arrived))

    def cancel(self, answers: Sequence[Answer]) -> None:
        """Ask for answers to end as soon as the step that runs is over."""
        with self._changed:
            for answer in answers:
                answer.cancelled = True
            self._changed.notify()

    def stop(self, *, wait: bool = True) -> None:
        """End the thread after the step that runs; whatever is unfinished ends as cancelled.

        Args:
            wait: until it has ended. A garbage collector must not: it may have interrupted anybody.
        """
        if not self._thread.is_alive():  # nor take a lock that was held when this process was forked
            return
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            atexit.unregister(self.stop)

    def _loop(self) -> None:
        scheduler = self._scheduler
        while True:
            with self._changed:
                while not (self._arrived or scheduler.busy or self._stopping):
                    self._changed.wait()
                for answer in self._arrived:
                    scheduler.add(answer)
                self._arrived.clear()
                stopping = self._stopping
            if stopping:
                scheduler.cancel_all()
                return
            try:
                scheduler.step()
            except BaseException as e:  # a fault of ours: nobody may be left waiting
                scheduler.fail_all(e)
