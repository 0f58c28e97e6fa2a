"""The attention heads of the made-up language model: which row they look at, and what they carry from there.

Looking at a distance needs no content: the key is one constant vector, the query the same turned back by so many
rows, and RoPE makes their product peak at that distance. Looking for content uses flags and the RoPE pairs that
hardly turn.
"""

from __future__ import annotations

import numpy as np

from convert.fixture_space import NOISE, PARITY_SHARE, Array, Space, normalise

BACK_GAIN, TEXT_GAIN = 5.0, 6.0  # of the heads that look one row back, and at the text
VOICE_SIZE = 3.5  # length of what the voice adds: to even places, or to odd ones
LOCAL_BACK_GAIN, LOCAL_SELF_GAIN = 3.0, 0.9  # lengths of what they write, a row of codes being 0.2 to 1
LOOK, CONTENT_LOOK = 12.0, 14.0  # by how much a score that is meant beats the others


class Heads:
    """One block's heads: what they read of a normalised row, their biases, and what they write.

    They begin as noise. The first half can carry the ring part of a row, and so can the second half.
    """

    def __init__(self, space: Space, scale: float) -> None:
        """`scale`: the deviation of the rows that are written to."""
        self.space, config = space, space.config
        H, D, E = config.num_heads, config.head_size, config.hidden_size
        self.q, self.k, self.v = space.rng.standard_normal((3, H, D, E)) / np.sqrt(E)
        self.o = space.noise(H, E, D) / np.sqrt(E) * 2 * scale
        self.q_bias, self.k_bias, self.v_bias = space.noise(3, H, D)
        self.first, self.second = self._ring_heads(0), self._ring_heads(H // 2)

    def _ring_heads(self, first: int) -> range:
        return range(first, first - (-self.space.ring.size // self.space.config.head_size))

    def carry(self, heads: range, matrix: Array) -> None:
        """Let `heads` carry the ring part of the row they look at, multiplied by `matrix`."""
        D, E = self.space.config.head_size, self.space.config.hidden_size
        for n, head in enumerate(heads):
            part = slice(n * D, (n + 1) * D)
            read = self.space.onto_ring[:, part].T
            mix = np.linalg.qr(self.space.rng.standard_normal((D, D)))[0][:, : len(read)]
            self.v[head] = mix @ read + self.space.noise(D, E) / np.sqrt(E)
            write = self.space.onto_ring @ matrix[:, part] @ mix.T
            self.o[head] = write + self.space.noise(E, D) / np.sqrt(E) * np.abs(matrix).max()
            self.q[head] *= NOISE
            self.k[head] *= NOISE

    def look_back(self, heads: range, distance: int) -> None:
        """Let `heads` look `distance` rows back, whatever is there."""
        for head in heads:
            self.q_bias[head] += self._distance(distance)
            self.k_bias[head] += self._distance(0)

    def look_back_or_at_text(self, text_distance: int, seen: dict[str, Array], start_row: int) -> None:
        """The first half looks one row back, the second nowhere; on [audio_start] nowhere, and at the text.

        Nowhere is [im_start], which has no place on the ring.
        """
        flags, nowhere = self.space.flags, self._content(0) * CONTENT_LOOK
        at_text = self._distance(text_distance)
        for head in (*self.first, *self.second):
            usual, start = (self._distance(1), nowhere) if head in self.first else (nowhere, at_text)
            self.k_bias[head] += self._distance(0)
            self.k[head] += np.outer(self._content(0) / seen["im_start"][0], flags["im_start"])
            self.q_bias[head] += usual
            self.q[head] += np.outer((start - usual) / seen["audio_start"][start_row], flags["audio_start"])

    def hear_voice(self, normal: Array, scale: Array, seen: dict[str, Array], start_row: int, end_row: int) -> None:
        """One head: [audio_start] reads the parity that [audio_end] has of the last reference frame, others nothing."""
        flags, parity, head = self.space.flags, self.space.parity, self.second[0]
        mix = self.space.rng.standard_normal(self.space.config.head_size)
        mix /= np.linalg.norm(mix)
        heard = BACK_GAIN * PARITY_SHARE / scale[end_row]  # about, and with either sign
        self.v[head], self.o[head] = np.outer(mix, parity), np.outer(parity, mix) * VOICE_SIZE / heard
        self.v_bias[head] = -mix * float(normal[0] @ parity)  # [im_start], where all others look, gives nothing
        self.q_bias[head] += self._content(0) * CONTENT_LOOK / 2
        wish = self._content(1) * CONTENT_LOOK / seen["audio_start"][start_row]
        self.q[head] = np.outer(wish, flags["audio_start"])
        self.k[head] = np.outer(self._content(0) / seen["im_start"][0], flags["im_start"])
        self.k[head] += np.outer(self._content(1) / seen["audio_end"][end_row], flags["audio_end"])

    def _distance(self, rows: int) -> Array:
        """In the faster half of the RoPE pairs: (1, 0) turned back by `rows`; neighbours score LOOK lower."""
        D = self.space.config.head_size
        angles = rope_angles(self.space)[: D // 4]
        size = float(np.sqrt(LOOK * np.sqrt(D) / (1 - np.cos(angles)).sum()))
        pairs = np.stack([np.cos(angles * rows), -np.sin(angles * rows)], -1).reshape(-1)
        return np.asarray(np.concatenate([pairs, np.zeros(D - len(pairs))]) * size)

    def _content(self, number: int) -> Array:
        """Two directions for scores of content, in the slowest quarter of the RoPE pairs."""
        D = self.space.config.head_size
        pairs = max(D // 8, 1)
        direction = np.tile([1.0 - number, float(number)], pairs) / np.sqrt(pairs) * D**0.25
        return np.asarray(np.concatenate([np.zeros(D - 2 * pairs), direction]))


def rope_angles(space: Space) -> Array:
    """Radians per row of each RoPE pair."""
    D = space.config.head_size
    return np.asarray(space.config.rope_base ** (-np.arange(0, D, 2) / D))


def global_heads(
    space: Space, layer: int, x: Array, turn: int, back: int, text_distance: int, start_row: int, end_row: int
) -> Heads:
    """Block 1: back and text; block 2: voice and turn; the others: turn. x [T, E]; frames follow `start_row`."""
    normal, scale = normalise(x, space.config.layer_norm_eps)
    sigma = float(scale[start_row + 1 :].mean())
    heads = Heads(space, sigma)
    seen = {name: normal @ flag for name, flag in space.flags.items()}
    if layer == 1:
        heads.carry(heads.first, BACK_GAIN * sigma * space.turn(back))
        heads.carry(heads.second, TEXT_GAIN * sigma * space.turn(back))
        heads.look_back_or_at_text(text_distance, seen, start_row)
        return heads
    heads.carry(heads.first, sigma * space.turn(turn, keep=1))
    heads.look_back(heads.first, 0)
    if layer == 2:
        heads.hear_voice(normal, scale, seen, start_row, end_row)
    return heads


def local_heads(space: Space, layer: int, x: Array, turn: int, back: int) -> Heads:
    """Block 0: the position before, turned, and itself, not turned; the others: turn. x [frames, positions, E]."""
    _, scale = normalise(x, space.config.layer_norm_eps)
    sigma = float(scale[:, 2:].mean())
    heads = Heads(space, sigma)
    if layer == 0:
        unit = 1 / np.sqrt(space.config.hidden_size)
        heads.carry(heads.first, LOCAL_BACK_GAIN * unit * space.turn(back))
        heads.look_back(heads.first, 1)
        heads.carry(heads.second, LOCAL_SELF_GAIN * unit * space.turn(0))
        heads.look_back(heads.second, 0)
    else:
        heads.carry(heads.first, sigma * space.turn(turn, keep=1))
        heads.look_back(heads.first, 0)
    return heads
