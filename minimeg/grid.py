"""Which ranks talk to which: the grid of ranks and the groups that follow from it. Arithmetic only; no torch.

A rank number is a number with mixed radix. Its digits are the rank's coordinates along the axes ``tp`` (tensor), ``cp`` (context),
``ep`` (expert), ``dp`` (data) and ``pp`` (pipeline), and the *order* string says which digit counts fastest: the leftmost. With
``tp-cp-ep-dp-pp``, Megatron-LM's default, tensor-parallel partners are neighbours 0, 1, .. and so share a machine, whose fast links
they need most; pipeline stages, which say least, lie farthest apart (Narayanan et al. 2021, section 3 and takeaway #1). A group of an
axis is what is left when only that digit varies. Hence the groups of one axis partition the world, and groups of two different axes
meet in at most one rank. Megatron-LM: ``RankGenerator``, ``generate_masked_orthogonal_rank_groups``.

See it: ``python -c "from minimeg.grid import Grid; print(Grid(16, tp=2, pp=4))"``, or ``Grid(16, tp=2, pp=4).svg(selected_rank=5)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from math import isqrt, prod

from minimeg.grid_drawing import draw

AXES = ("tp", "cp", "ep", "dp", "pp")
# In which order axes of size 1 that an order string leaves out are appended to it: Megatron's.
_APPENDED = ("tp", "pp", "dp", "ep", "cp")


@dataclass(frozen=True)
class Grid:
    """The layout of ``world_size`` ranks; the data-parallel size is what remains: dp = world_size / (tp cp ep pp).

    ``order`` names the axes, the fastest first; upper case is read as lower, and an axis of size 1 may be left out (it is
    appended). Sixteen GPUs on two machines, tp=2, pp=4, hence dp=2:

    >>> grid = Grid(16, tp=2, pp=4)
    >>> grid.groups("tp")[:3], grid.groups("dp")[:3]
    ([[0, 1], [2, 3], [4, 5]], [[0, 2], [1, 3], [4, 6]])
    >>> grid.groups("pp")
    [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    >>> grid.coordinates(5)
    {'tp': 1, 'cp': 0, 'ep': 0, 'dp': 0, 'pp': 1}

    A mixture of experts is two grids over the same ranks with the same pipeline: attention does not know ``ep``, experts do not
    know ``cp`` and may have a tp of their own. (One grid with both axes is well defined, too; Megatron-LM refuses it.)

    >>> attention, experts = Grid(16, tp=2, cp=2, pp=2), Grid(16, tp=1, ep=4, pp=2)
    >>> attention.groups("pp") == experts.groups("pp"), experts.groups("ep")[0]
    (True, [0, 1, 2, 3])

    Raises:
        ValueError: with every fault of the layout, one a line, each with the sizes and a legal alternative.
    """

    world_size: int
    _: KW_ONLY
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    order: str = "tp-cp-ep-dp-pp"

    def __post_init__(self) -> None:
        given = {"tp": self.tp, "cp": self.cp, "ep": self.ep, "pp": self.pp}
        sizes, faults = _check_sizes(self.world_size, given)
        tokens, order_faults = _check_order(self.order, sizes)
        if faults or order_faults:
            raise ValueError("this grid of ranks is impossible:\n  " + "\n  ".join([*faults, *order_faults]))
        left_out = [axis for axis in _APPENDED if axis not in tokens]
        object.__setattr__(self, "order", "-".join([*tokens, *left_out]))  # the dataclass is frozen from here on

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.cp * self.ep * self.pp)

    @property
    def sizes(self) -> dict[str, int]:
        return {"tp": self.tp, "cp": self.cp, "ep": self.ep, "dp": self.dp, "pp": self.pp}

    @property
    def strides(self) -> dict[str, int]:
        """How far apart neighbours along each axis are: the product of the sizes of all axes to its left in ``order``."""
        strides, stride, sizes = {}, 1, self.sizes
        for axis in self.order.split("-"):
            strides[axis] = stride
            stride *= sizes[axis]
        return {axis: strides[axis] for axis in AXES}

    def groups(self, axes: str) -> list[list[int]]:
        """The groups along an axis such as ``"tp"``, or a union of axes such as ``"tp-pp"``; the order within the name is free.

        Inside a group the named axes vary and all others stay. Members, and the groups themselves, count as ranks do: the axis
        that is leftmost in ``order`` fastest. That is Megatron's order, and the order in which every rank must create them.
        """
        named = _check_axes(axes)
        inside = [axis for axis in self.order.split("-") if axis in named]
        outside = [axis for axis in self.order.split("-") if axis not in named]
        offsets = self._count(inside)
        return [[first + offset for offset in offsets] for first in self._count(outside)]

    def _count(self, axes: Iterable[str]) -> list[int]:
        """The ranks reached from rank 0 along ``axes``, the first axis fastest."""
        ranks, sizes, strides = [0], self.sizes, self.strides
        for axis in axes:
            ranks = [rank + index * strides[axis] for index in range(sizes[axis]) for rank in ranks]
        return ranks

    def coordinates(self, rank: int) -> dict[str, int]:
        """The digits of ``rank``: ``{"tp": .., "cp": .., "ep": .., "dp": .., "pp": ..}``."""
        if not _is_integer(rank) or not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank!r} is not in this grid; its ranks are the integers 0..{self.world_size - 1}")
        strides = self.strides
        return {axis: rank // strides[axis] % size for axis, size in self.sizes.items()}

    def rank_at(self, *, tp: int = 0, cp: int = 0, ep: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank with these coordinates, the inverse of :meth:`coordinates`. An axis not given counts as 0."""
        at, sizes, strides = {"tp": tp, "cp": cp, "ep": ep, "dp": dp, "pp": pp}, self.sizes, self.strides
        faults = [
            f"{axis}={index!r} is outside {axis} of size {sizes[axis]}; use an integer in 0..{sizes[axis] - 1}"
            for axis, index in at.items()
            if not _is_integer(index) or not 0 <= index < sizes[axis]
        ]
        if faults:
            raise ValueError("no rank has these coordinates:\n  " + "\n  ".join(faults))
        return sum(index * strides[axis] for axis, index in at.items())

    def embedding_groups(self) -> list[list[int]]:
        """[first, last] rank of each pipeline: both hold the tied word embedding and add their gradients. [only] where pp = 1."""
        return [[pipeline[0], pipeline[-1]] if self.pp > 1 else pipeline for pipeline in self.groups("pp")]

    def position_embedding_groups(self) -> list[list[int]]:
        """[first] rank of each pipeline, which alone holds the position embedding."""
        return [[pipeline[0]] for pipeline in self.groups("pp")]

    @property
    def summary(self) -> str:
        sizes = " ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1)
        plural = "s" if self.world_size > 1 else ""
        return f"{self.world_size} rank{plural}: {sizes or 'every axis has size 1'}, order {self.order}"

    def __str__(self) -> str:
        """A table: stages (and cp) downwards, tp side by side, ep and dp to the right. Wide grids continue below."""
        return "\n".join(_table(self))

    def svg(self, selected_rank: int | None = None, ranks_per_node: int | None = None) -> str:
        """The grid as a picture (SVG text), drawn as everywhere in the course.

        ``selected_rank`` shows the groups which that rank belongs to. ``ranks_per_node`` draws each machine as a dashed box
        around its ranks; links of the selected rank's groups that leave a machine are then marked as slow.
        """
        if selected_rank is not None:
            self.coordinates(selected_rank)  # for its range check
        if ranks_per_node is not None and (not _is_integer(ranks_per_node) or ranks_per_node < 1):
            raise ValueError(f"ranks_per_node={ranks_per_node!r} must be an integer of at least 1, e.g. 8")
        return draw(self, selected_rank, ranks_per_node)


def _table(grid: Grid, width: int = 120) -> Iterator[str]:
    """The lines of ``str(grid)``. Columns that do not fit into ``width`` characters continue below."""

    def name(axis: str, index: int) -> str:
        return f"{axis} {index:<{len(str(grid.sizes[axis] - 1))}}"

    sides = [axis for axis in ("pp", "cp") if grid.sizes[axis] > 1]
    tops = [axis for axis in ("dp", "ep", "tp") if grid.sizes[axis] > 1]
    rows = [{"pp": pp, "cp": cp} for pp in range(grid.pp) for cp in range(grid.cp)]
    columns = [
        {"dp": dp, "ep": ep, "tp": tp} for dp in range(grid.dp) for ep in range(grid.ep) for tp in range(grid.tp)
    ]
    labels = ["  ".join(name(axis, row[axis]) for axis in sides) for row in rows]
    cell = 2 + max(len(str(grid.world_size - 1)), *(len(name(axis, 0)) for axis in tops), 0)
    fit = max(1, (width - len(labels[0])) // cell)
    fit = fit // grid.tp * grid.tp or fit  # a tensor-parallel group stays on one line if it can
    yield grid.summary
    for start in range(0, len(columns), fit):
        band = columns[start : start + fit]
        yield ""
        for axis in tops:
            # An outer axis is named where it changes, tp above every column.
            shown = [axis == "tp" or i == 0 or at[axis] != band[i - 1][axis] for i, at in enumerate(band)]
            names = (name(axis, at[axis]) if show else "" for at, show in zip(band, shown, strict=True))
            yield (" " * len(labels[0]) + "".join(text.rjust(cell) for text in names)).rstrip()
        for label, row in zip(labels, rows, strict=True):
            yield label + "".join(str(grid.rank_at(**row, **at)).rjust(cell) for at in band)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_sizes(world_size: int, given: dict[str, int]) -> tuple[dict[str, int], list[str]]:
    """-> the sizes known so far (dp among them if it can be computed), and what is wrong."""
    faults = []
    world_is_good = _is_integer(world_size) and world_size >= 1
    sizes = {axis: size for axis, size in given.items() if _is_integer(size) and size >= 1}
    product = prod(sizes.values())
    if not world_is_good:
        faults.append(f"world_size={world_size!r} must be an integer of at least 1; use {product}")
    for axis in (axis for axis in given if axis not in sizes):
        legal = _divisors(world_size // product) if world_is_good and world_size % product == 0 else [1]
        faults.append(f"{axis}={given[axis]!r} must be an integer of at least 1; use {_either(legal)}")
    if world_is_good and world_size % product != 0:
        factors = {axis: size for axis, size in sizes.items() if size > 1}
        shown = " * ".join(f"{axis}={size}" for axis, size in factors.items()) + f" = {product}" * (len(factors) > 1)
        multiple = world_size // product * product
        remedies = [f"world_size={_either([size for size in (multiple, multiple + product) if size])}"]
        for axis, size in factors.items():
            rest = product // size
            if world_size % rest == 0:  # else changing this axis alone does not help
                remedies.append(f"{axis}={_either(_divisors(world_size // rest))}")
        faults.append(f"world_size={world_size} is not a multiple of {shown}; use {', or '.join(remedies)}")
    if not faults:
        sizes["dp"] = world_size // product
    return sizes, faults


def _check_order(order: object, sizes: dict[str, int]) -> tuple[list[str], list[str]]:
    """-> the axes that ``order`` names, and what is wrong with it."""
    needed = [axis for axis in AXES if sizes.get(axis, 1) > 1]
    if not isinstance(order, str):
        return [], [f"order={order!r} must be a string of axes, fastest first; use {'-'.join(AXES)!r}"]
    tokens = order.lower().split("-")
    known = list(dict.fromkeys(token for token in tokens if token in AXES))
    missing = [axis for axis in needed if axis not in known]
    unknown = list(dict.fromkeys(token for token in tokens if token not in AXES))
    twice = list(dict.fromkeys(token for token in known if tokens.count(token) > 1))
    wrong = [f"has no such axis {token!r} (the axes are {', '.join(AXES)})" for token in unknown]
    wrong += [f"names {token!r} more than once" for token in twice]
    wrong += [f"leaves out {axis!r}, whose size is {sizes[axis]}" for axis in missing]
    legal = "-".join([*known, *missing] or AXES)
    return known, [f"order={order!r} {fault}; use e.g. {legal!r}" for fault in wrong]


def _check_axes(axes: object) -> list[str]:
    tokens = axes.lower().split("-") if isinstance(axes, str) else []
    if not tokens or len(set(tokens)) < len(tokens) or not set(tokens) <= set(AXES):
        raise ValueError(
            f"axes={axes!r} must be one axis or different axes joined by '-', of {', '.join(AXES)}; use e.g. 'tp' or 'tp-pp'"
        )
    return tokens


def _divisors(n: int) -> list[int]:
    low = [i for i in range(1, isqrt(n) + 1) if n % i == 0]
    return sorted({*low, *(n // i for i in low)})


def _either(values: list[int]) -> str:
    return " or ".join(filter(None, [", ".join(map(str, values[:-1])), str(values[-1])]))
