"""Where each parameter of a block lies in the block's flat buffers: the one truth for packing.

A block is a list of *segments*; all parameters of a segment share (dtype, trainable, decayed), so
a segment is what one optimizer sweep, one copy or one cast handles.  For every purpose (weight,
residual, moments, gradient) a block has one flat byte buffer in which the segments follow one
another, each aligned to `ALIGN_ELEMENTS`.

Promise: pure data, no torch; the same specs give the same layout on every machine.
Price: up to 127 padding elements per parameter, which stay zero.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

ALIGN_ELEMENTS = 128  # 256 bytes of bf16: the alignment that GPU copies and kernels like

DISK_ALIGN_BYTES = 4096
"""What direct I/O wants of offsets, lengths and memory."""

ITEM_BYTES = {"bfloat16": 2, "float32": 4, "int16": 2}


class Purpose(StrEnum):
    """What a flat buffer of a block holds."""

    WEIGHT = "weight"
    """Compute copy (bf16), or the fp32 master itself; every parameter."""
    RESIDUAL = "residual"
    """int16 that completes a bf16 weight to its fp32 master; trainable bf16 segments."""
    EXP_AVG = "exp_avg"
    """First Adam moment, fp32; trainable segments."""
    EXP_AVG_SQ = "exp_avg_sq"
    """Second Adam moment, fp32; trainable segments."""
    GRADIENT = "gradient"
    """Gradient of one optimizer step as it waits for its update; trainable segments."""
    ACCUMULATOR = "accumulator"
    """fp32 sum of the micro-batches' gradients on the compute device; trainable segments."""


STATE = (Purpose.WEIGHT, Purpose.RESIDUAL, Purpose.EXP_AVG, Purpose.EXP_AVG_SQ)
"""What persists from step to step."""


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter before it is placed."""

    name: str
    """Full name in the model's state dict."""
    shape: tuple[int, ...]
    dtype: str
    """dtype of the compute copy: bfloat16 or float32."""
    trainable: bool
    decayed: bool
    """Whether weight decay applies (not to biases and norms)."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class PlacedParam:
    """One parameter at its place within a segment."""

    name: str
    shape: tuple[int, ...]
    numel: int
    offset: int
    """Elements from the start of the segment."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Parameters that are stored, copied and updated together."""

    dtype: str
    trainable: bool
    decayed: bool
    numel: int
    """Elements including padding."""
    params: tuple[PlacedParam, ...]


@dataclass(frozen=True, kw_only=True)
class Region:
    """One segment's share of a flat buffer."""

    segment: int
    """Index into `BlockLayout.segments`."""
    dtype: str
    byte_offset: int
    numel: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """One purpose's share of a block on the disk."""

    offset: int
    nbytes: int

    @property
    def moved(self) -> int:
        """Bytes that are read or written: whole pages."""
        return -(-self.nbytes // DISK_ALIGN_BYTES) * DISK_ALIGN_BYTES

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.offset + self.moved


def _align(elements: int) -> int:
    return -(-elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """The segments of one block, in a fixed order."""

    segments: tuple[Segment, ...]

    @classmethod
    def build(cls, specs: Iterable[ParamSpec]) -> "BlockLayout":
        """Place parameters in the order given; segments in order of first appearance.

        Raises:
            ValueError: if a name appears twice or a dtype is not a compute dtype.
        """
        groups: dict[tuple[str, bool, bool], list[ParamSpec]] = {}
        names: set[str] = set()
        for spec in specs:
            if spec.name in names:
                raise ValueError(f"parameter {spec.name} appears twice in one block")
            if spec.dtype not in ("bfloat16", "float32"):
                raise ValueError(f"parameter {spec.name} has unsupported dtype {spec.dtype}")
            names.add(spec.name)
            groups.setdefault((spec.dtype, spec.trainable, spec.decayed), []).append(spec)
        segments = []
        for (dtype, trainable, decayed), members in groups.items():
            placed, offset = [], 0
            for spec in members:
                placed.append(
                    PlacedParam(name=spec.name, shape=spec.shape, numel=spec.numel, offset=offset)
                )
                offset = _align(offset + spec.numel)
            segments.append(
                Segment(
                    dtype=dtype,
                    trainable=trainable,
                    decayed=decayed,
                    numel=offset,
                    params=tuple(placed),
                )
            )
        return cls(segments=tuple(segments))

    def regions(self, purpose: Purpose, gradient_dtype: str = "float32") -> tuple[Region, ...]:
        """The regions of the block's flat buffer for `purpose`, in order."""
        regions, offset = [], 0
        for index, segment in enumerate(self.segments):
            dtype = _region_dtype(segment, purpose, gradient_dtype)
            if dtype is None:
                continue
            regions.append(
                Region(segment=index, dtype=dtype, byte_offset=offset, numel=segment.numel)
            )
            offset += segment.numel * ITEM_BYTES[dtype]
        return tuple(regions)

    def nbytes(self, purpose: Purpose, gradient_dtype: str = "float32") -> int:
        """Bytes of the block's flat buffer for `purpose`, padding included."""
        known, key = self._counted, (purpose, gradient_dtype)
        if key not in known:
            regions = self.regions(purpose, gradient_dtype)
            known[key] = sum(region.numel * ITEM_BYTES[region.dtype] for region in regions)
        return known[key]

    @cached_property
    def _counted(self) -> dict[tuple[Purpose, str], int]:
        """What `nbytes` has found: a planner asks millions of times."""
        return {}

    def on_disk(self, gradient_dtype: str | None) -> dict[Purpose, Part]:
        """Where each purpose is in the block's piece of a file, or of memory that it is read into.

        Args:
            gradient_dtype: of a gradient that waits behind the state; None if none does.
        """
        parts, offset = {}, 0
        for purpose in STATE if gradient_dtype is None else (*STATE, Purpose.GRADIENT):
            parts[purpose] = Part(
                offset=offset, nbytes=self.nbytes(purpose, gradient_dtype or "float32")
            )
            offset = parts[purpose].end
        return parts

    def nbytes_on_disk(self, gradient_dtype: str | None) -> int:
        """Bytes of that piece."""
        return max(part.end for part in self.on_disk(gradient_dtype).values())

    @property
    def params(self) -> tuple[PlacedParam, ...]:
        """Every parameter of the block, segment by segment."""
        return tuple(param for segment in self.segments for param in segment.params)

    @property
    def trainable_params(self) -> tuple[PlacedParam, ...]:
        """The parameters that get a gradient, in the fixed order of the norm."""
        return tuple(p for segment in self.segments if segment.trainable for p in segment.params)

    @property
    def num_params(self) -> int:
        """Parameter count without padding."""
        return sum(param.numel for param in self.params)

    @property
    def trainable(self) -> bool:
        return any(segment.trainable for segment in self.segments)


def _region_dtype(segment: Segment, purpose: Purpose, gradient_dtype: str) -> str | None:
    """dtype of the segment's region for `purpose`; None where the segment has none."""
    if purpose is Purpose.WEIGHT:
        return segment.dtype
    if not segment.trainable:
        return None
    if purpose is Purpose.RESIDUAL:
        return "int16" if segment.dtype == "bfloat16" else None
    if purpose is Purpose.GRADIENT:
        return gradient_dtype
    return "float32"
