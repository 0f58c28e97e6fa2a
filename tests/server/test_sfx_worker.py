"""The worker of MOSS-SoundEffect hears of a client that leaves between two rows."""

from __future__ import annotations

from multiprocessing import Pipe

from runtime.server.jobs import Beat, Cancel, SoundJob, Started
from runtime.server.sfx_worker import _Sounds
from runtime.sfx.prompt import SoundPrompt
from runtime.sfx.sampling import SfxSampling


def test_a_cancelled_sound_ends_at_the_next_row_and_the_worker_goes_on():
    ours, theirs = Pipe()
    rows, events = [], []

    class Endless:
        def create(self, *_, on_row, on_piece):
            if rows:
                ours.send(None)
                on_row(0)
            for row in range(100):
                if row == 3:
                    ours.send(Cancel("a"))
                rows.append(row)
                on_row(row)
            raise AssertionError("nobody stopped it")

    for name in ("a", "b"):
        ours.send(SoundJob(name, SoundPrompt("rain"), 0, SfxSampling(), 100))
    _Sounds(theirs, Endless(), events.append).run()
    assert rows == [0, 1, 2, 3] and events == [Started("a"), *[Beat()] * 4, Started("b"), Beat()]
