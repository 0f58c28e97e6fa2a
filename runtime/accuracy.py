"""Accuracy over a list of texts: two backends, greedy, and how many codes agree, text by text.

The published evaluation of NPU ports speaks a list of texts on the CPU and on the device and counts; here the count
comes with its first difference, and a difference that is a tie is told apart from one that is not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.backends.base import Backend
from runtime.manifest import Manifest
from runtime.parity import compare, plain_numbers
from runtime.parity_record import Plan, record
from runtime.parity_verdict import Limits, Verdict, worst
from runtime.synthesizer import Synthesizer
from runtime.voices import VoiceStore

FORMAT = "moss-accuracy-1"
# English, Chinese, both in one, numbers, dates, money, punctuation of both scripts, a question, capitals, one word.
TEXTS = (
    "Hello, and welcome.",
    "The quick brown fox jumps over the lazy dog.",
    "你好，欢迎使用语音合成系统。",
    "今天天气很好，我们一起去公园散步吧！",
    "我正在使用 Ascend NPU 运行 MOSS-TTS-Nano 模型。",
    "In 2024, sales rose by 12.5 percent to $3,400,000.",
    "会议定于2025年3月14日下午3点30分开始，共有128人参加。",
    'Wait... really?! "Yes," she said; then: nothing (at all).',
    "“真的吗？”他问道；她回答：“是的——当然！”……",
    "Please call 555-0199 or write to info@example.com.",
    "NASA and the WHO are abbreviations, aren't they?",
    "OK.",
)
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TextResult:
    """One text on both sides."""

    text: str
    verdict: Verdict
    frames: tuple[int, int]
    free_agreement: float | None  # greedy, each side on its own
    replay_agreement: float | None  # both fed the codes of a
    replay_ties: int  # frames that differ by a tie
    replay_divergent: int
    snr_db: float | None
    first: str  # where the greedy runs part; empty when they do not
    finding: str


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The whole table."""

    a: str
    b: str
    artifacts: tuple[str, str]
    made_up: bool
    simulated: bool
    results: tuple[TextResult, ...]

    @property
    def verdict(self) -> Verdict:
        found = [r.verdict for r in self.results]
        return Verdict.DIVERGENT if Verdict.DIVERGENT in found else worst(found)

    @property
    def same_texts(self) -> int:
        """Texts whose greedy runs agree in every code."""
        return sum(r.free_agreement == 1.0 and not r.first for r in self.results)

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {"format": FORMAT, **dataclasses.asdict(self), "verdict": self.verdict.value}
        data |= {"texts": len(self.results), "texts_with_equal_codes": self.same_texts}
        plain: dict[str, Any] = plain_numbers(data)
        return plain


@dataclass(frozen=True, slots=True)
class OpenSide:
    """A side that is ready to speak."""

    manifest: Manifest
    backend: Backend | None  # None: a published package on its own graphs
    synthesizer: Synthesizer
    fused: bool = True
    voices: VoiceStore | None = None  # where the name of a voice is looked up, when not in the store


def measure_accuracy(
    a: OpenSide,
    b: OpenSide,
    texts: Sequence[str],
    voice: Path | None,
    frames: int,
    limits: Limits | None,
    report: Report,
) -> Accuracy:
    """Speak every text on both sides; without `limits`, those of their weights."""
    results = []
    made_up = simulated = False
    for index, text in enumerate(texts, start=1):
        plan = Plan(text, voice, frames=frames)
        first = record(a.synthesizer, a.backend, plan, None, a.fused, ("greedy", "replay"))
        second = record(b.synthesizer, b.backend, plan, first, b.fused, ("greedy", "replay"))
        parity = compare(first, second, limits)
        greedy, replay = parity.mode("greedy"), parity.mode("replay")
        results.append(
            TextResult(
                text,
                parity.verdict,
                greedy.frames,
                greedy.agreement,
                replay.agreement,
                replay.num_ties,
                replay.num_divergent,
                parity.audio.snr_db if parity.audio is not None else None,
                str(greedy.first) if greedy.first is not None else "",
                parity.text,
            )
        )
        made_up |= parity.a.made_up or parity.b.made_up
        simulated |= parity.a.simulated or parity.b.simulated
        report(f"{index} of {len(texts)}: {parity.verdict.value}: {text}")
    names = a.synthesizer.frame_model.backend_name, b.synthesizer.frame_model.backend_name
    return Accuracy(*names, (a.manifest.name, b.manifest.name), made_up, simulated, tuple(results))


def accuracy_lines(accuracy: Accuracy) -> list[str]:
    """The table for a terminal."""
    lines = [f"{accuracy.verdict.value}: {accuracy.a} against {accuracy.b}, greedy; "
             f"{accuracy.same_texts} of {len(accuracy.results)} texts with equal codes"]  # fmt: skip
    lines += ["note: made-up weights: no statement about speech"] if accuracy.made_up else []
    lines += ["note: a side ran on the simulator: nothing here is a device result"] if accuracy.simulated else []
    lines.append(f"{'verdict':<17} {'frames':>9} {'free':>8} {'replay':>8} {'ties':>5} {'SNR dB':>7}  text")
    for r in accuracy.results:
        lines.append(
            f"{r.verdict.value:<17} {f'{r.frames[0]}/{r.frames[1]}':>9} {_share(r.free_agreement):>8} "
            f"{_share(r.replay_agreement):>8} {r.replay_ties:>5} {_decibel(r.snr_db):>7}  {r.text[:48]}"
        )
        if not r.verdict.agrees:
            lines.append(f"  {r.finding}")
    return lines


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2%}"


def _decibel(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
