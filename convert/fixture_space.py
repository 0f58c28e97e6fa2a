"""Where the made-up language model keeps things: a ring of places, flags, and free coordinates, in a random basis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.config import ModelConfig

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FLAGS = ("slot", "im_start", "audio_start", "audio_end")  # what heads recognise rows by
NOISE = 0.01
PARITY_SHARE = 0.3  # coordinate of B[p] that is + on even and - on odd places; channel 0 and starts alone have it


@dataclass(frozen=True, slots=True)
class Ring:
    """Places on a ring as vectors: pairs of cosine and sine, then the parity coordinate, then one that stays empty."""

    places: int
    frequencies: npt.NDArray[np.int64]

    @property
    def size(self) -> int:
        return 2 * len(self.frequencies) + 2

    def vector(self, place: npt.ArrayLike, parity: float) -> Array:
        """B[p], of length 1."""
        p = np.asarray(place)[..., None]
        angle = 2 * np.pi * self.frequencies * p / self.places
        waves = np.stack([np.cos(angle), np.sin(angle)], -1).reshape(*p.shape[:-1], -1)
        even = parity * (1.0 - 2.0 * (p % 2))
        return np.concatenate([waves * np.sqrt((1 - parity**2) / len(self.frequencies)), even, 0 * even], -1)

    def turn(self, places: int) -> Array:
        """R^d with R^d B[p] = B[p + d]."""
        matrix = np.eye(self.size)
        for j, angle in enumerate(2 * np.pi * self.frequencies * places / self.places):
            cos, sin = np.cos(angle), np.sin(angle)
            matrix[2 * j : 2 * j + 2, 2 * j : 2 * j + 2] = [[cos, -sin], [sin, cos]]
        matrix[-2, -2] = (-1.0) ** places
        return matrix


class Space:
    """The residual stream in its own coordinates: the mean (which LayerNorm removes), the ring, the flags, the rest."""

    def __init__(self, config: ModelConfig, rng: np.random.Generator) -> None:
        self.config, self.rng = config, rng
        E, V = config.hidden_size, config.codebook_size
        square = rng.standard_normal((E, E))
        square[:, 0] = 1
        basis = np.linalg.qr(square)[0]
        number = min(config.num_heads // 2 * config.head_size // 2 - 1, (V - 1) // 2)
        self.ring = Ring(V, np.sort(rng.permutation(np.arange(1, (V + 1) // 2))[:number]))
        first = 1 + self.ring.size
        self.onto_ring: Array = basis[:, 1:first]  # [E, ring]
        self.parity: Array = self.onto_ring[:, -2]
        self.flags: dict[str, Array] = {name: basis[:, first + i] for i, name in enumerate(FLAGS)}
        self.free: Array = basis[:, first + len(FLAGS) :]

    def at(self, places: npt.ArrayLike, parity: float) -> Array:
        """B[p] as rows [..., E]."""
        return np.asarray(self.ring.vector(places, parity) @ self.onto_ring.T)

    def turn(self, places: int, keep: float = 0.0) -> Array:
        """R^d minus `keep` times the identity, in ring coordinates."""
        return self.ring.turn(places) - keep * np.eye(self.ring.size)

    def free_noise(self, count: int, size: float) -> Array:
        """Random rows of length `size` outside the ring and the flags."""
        noise = self.rng.standard_normal((count, self.free.shape[1]))
        return np.asarray(size * noise / np.linalg.norm(noise, axis=1, keepdims=True) @ self.free.T)

    def noise(self, *shape: int) -> Array:
        return self.rng.standard_normal(shape) * NOISE


def normalise(x: Array, epsilon: float) -> tuple[Array, Array]:
    """x minus its mean over its deviation, and the deviation [..., rows]."""
    centred = x - x.mean(-1, keepdims=True)
    scale = np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon)
    return centred / scale, scale[..., 0]
