"""Grid: equal to Megatron's groups, the algebra of groups on every small world, faults, table and picture."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as ElementTree
from itertools import combinations, pairwise, permutations
from pathlib import Path
from typing import Any

import pytest

from minimeg.grid import AXES, Grid

ORACLE = json.loads(
    (Path(__file__).parent / "data" / "rank_groups.json").read_text()
)  # written by megatron-core 0.16.1
CONFIGS = ORACLE["configs"]
DEFAULT = "tp-cp-ep-dp-pp"


def name_of(config: dict[str, Any]) -> str:
    return f"{config['world_size']}-tp{config['tp']}cp{config['cp']}pp{config['pp']}ep{config['ep']}-{config['order']}"


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


def factorisations(world_size: int) -> list[dict[str, int]]:
    """All (tp, cp, pp) whose product divides the world; dp is the rest."""
    return [
        {"tp": tp, "cp": cp, "pp": pp}
        for tp in divisors(world_size)
        for cp in divisors(world_size // tp)
        for pp in divisors(world_size // tp // cp)
    ]


# ---- Megatron's groups -------------------------------------------------------------------------------------------------------


def test_the_oracle_is_whole() -> None:
    assert len(CONFIGS) == 36
    assert len(ORACLE["errors"]) == 2
    assert [c["initialize_model_parallel_accepts"] for c in CONFIGS].count(False) == 2  # layouts that only we accept


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_groups_equal_megatrons(config: dict[str, Any]) -> None:
    grid = Grid(config["world_size"], tp=config["tp"], cp=config["cp"], pp=config["pp"], order=config["order"])
    assert {axes: grid.groups(axes) for axes in config["groups"]} == config["groups"]
    assert grid.embedding_groups() == config["embedding"]
    assert grid.position_embedding_groups() == config["position_embedding"]
    assert (grid.dp, grid.order) == (config["dp"], config["resolved_order"])


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_expert_groups_equal_megatrons(config: dict[str, Any]) -> None:
    """The experts' generator is a second grid, with ep, a tp of its own and no cp."""
    experts = Grid(
        config["world_size"], tp=config["expert_tp"], ep=config["ep"], pp=config["pp"], order=config["order"]
    )
    assert {axes: experts.groups(axes) for axes in config["expert_groups"]} == config["expert_groups"]
    assert experts.dp == config["expert_dp"]


def test_what_megatron_refuses() -> None:
    """cp and ep in one generator: Megatron refuses, but the groups are well defined. An axis left out: nobody can know where."""
    both, left_out = (error["args"] for error in ORACLE["errors"])
    grid = Grid(8, tp=both["tp"], cp=both["cp"], ep=both["ep"], pp=both["pp"], order=both["order"])
    assert grid.groups("cp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert grid.groups("ep") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(ValueError, match=r"order='tp-dp' leaves out 'pp', whose size is 2; use e.g. 'tp-dp-pp'"):
        Grid(8, tp=left_out["tp"], pp=left_out["pp"], order=left_out["order"])


def test_pipeline_before_data_with_context_parallelism() -> None:
    """Megatron's second generator would have other pipelines here, so it refuses the order even without experts."""
    grid = Grid(16, tp=2, cp=2, pp=2, order="tp-cp-ep-pp-dp")
    assert grid.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]]
    assert grid.groups("dp") == [[rank, rank + 8] for rank in range(8)]


def test_documented_order_is_the_order_of_the_code() -> None:
    """fairscale#1189: the docstring showed one grouping and the code made another."""
    grid = Grid(16, tp=2, cp=2, pp=2, order="tp-cp-dp-pp")
    assert grid.groups("tp") == [[rank, rank + 1] for rank in range(0, 16, 2)]
    assert grid.groups("cp") == [[rank, rank + 2] for rank in (0, 1, 4, 5, 8, 9, 12, 13)]
    assert grid.groups("dp") == [[rank, rank + 4] for rank in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert grid.groups("pp") == [[rank, rank + 8] for rank in range(8)]


# ---- the algebra of groups, on every factorisation of every world up to 64 ---------------------------------------------------


def assert_sound(grid: Grid) -> int:
    """Partition, at most one common rank, inverse. -> the number of groups looked at."""
    ranks = list(range(grid.world_size))
    groups_along = {axis: grid.groups(axis) for axis in AXES}
    group_of = {}
    for axis, groups in groups_along.items():
        assert sorted(rank for group in groups for rank in group) == ranks
        assert {len(group) for group in groups} == {grid.sizes[axis]}
        group_of[axis] = {rank: number for number, group in enumerate(groups) for rank in group}
    for a, b in combinations(AXES, 2):
        # Two ranks that share a group of a and a group of b would give the same pair twice.
        assert len({(group_of[a][rank], group_of[b][rank]) for rank in ranks}) == len(ranks)
    seen = set()
    for rank in ranks:
        at = grid.coordinates(rank)
        assert grid.rank_at(**at) == rank
        seen.add(tuple(at.values()))
        for axis in AXES:  # a coordinate is the position in the group of that axis
            assert groups_along[axis][group_of[axis][rank]][at[axis]] == rank
    assert len(seen) == len(ranks)
    return sum(map(len, groups_along.values()))


def test_every_factorisation_up_to_64_ranks() -> None:
    layouts = [(world, sizes) for world in range(1, 65) for sizes in factorisations(world)]
    assert len(layouts) == 1824
    for world, sizes in layouts:
        assert_sound(Grid(world, **sizes))


@pytest.mark.parametrize("order", ["-".join(axes) for axes in permutations(("tp", "cp", "dp", "pp"))])
def test_every_order(order: str) -> None:
    for sizes in factorisations(24):
        grid = Grid(24, **sizes, order=order)
        assert_sound(grid)
        fastest = next((axis for axis in order.split("-") if grid.sizes[axis] > 1), "tp")
        assert grid.groups(fastest)[0] == list(range(grid.sizes[fastest]))  # leftmost: neighbouring ranks


def test_five_axes_at_once() -> None:
    grid = Grid(96, tp=2, cp=2, ep=3, pp=4)
    assert grid.sizes == {"tp": 2, "cp": 2, "ep": 3, "dp": 2, "pp": 4}
    assert assert_sound(grid) == 96 // 2 + 96 // 2 + 96 // 3 + 96 // 2 + 96 // 4


def test_union_of_axes() -> None:
    grid = Grid(16, tp=2, pp=4)
    assert grid.groups("tp-pp") == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]
    assert grid.groups("pp-tp") == grid.groups("tp-pp") == grid.groups("TP-PP")
    assert grid.groups("dp-cp") == grid.groups("dp")  # an axis of size 1 adds nobody
    assert grid.groups(DEFAULT) == [list(range(16))]


def test_embedding_groups() -> None:
    assert Grid(16, tp=2, pp=4).embedding_groups() == [[0, 12], [1, 13], [2, 14], [3, 15]]
    assert Grid(16, tp=2, pp=4).position_embedding_groups() == [[0], [1], [2], [3]]
    assert Grid(2, tp=2).embedding_groups() == [[0], [1]]  # one stage is first and last


# ---- a value -----------------------------------------------------------------------------------------------------------------


def test_a_grid_is_a_value() -> None:
    grid = Grid(16, tp=2, pp=4)
    assert grid == Grid(16, tp=2, pp=4, order="TP-CP-EP-DP-PP")
    assert len({grid, Grid(16, tp=2, pp=4), Grid(16, tp=4, pp=2)}) == 2
    assert eval(repr(grid)) == grid
    assert repr(grid) == "Grid(world_size=16, tp=2, cp=1, ep=1, pp=4, order='tp-cp-ep-dp-pp')"
    with pytest.raises(dataclasses.FrozenInstanceError):
        grid.tp = 4  # type: ignore[misc]
    grid.sizes["tp"] = 99  # a copy
    grid.groups("tp")[0].append(99)
    assert grid.sizes["tp"] == 2
    assert grid.groups("tp")[0] == [0, 1]


def test_axes_of_size_one_may_be_left_out_of_the_order() -> None:
    assert Grid(8, tp=2, pp=2, order="pp-tp-dp").order == "pp-tp-dp-ep-cp"
    assert Grid(4, tp=4, order="tp").groups("tp") == [[0, 1, 2, 3]]


# ---- faults ------------------------------------------------------------------------------------------------------------------

BAD = [
    ((12,), {"tp": 2, "pp": 4}, ["world_size=12", "tp=2 * pp=4 = 8", "world_size=8 or 16", "tp=1 or 3", "pp=1, 2, 3 or 6"]),
    ((8,), {"tp": 3}, ["world_size=8 is not a multiple of tp=3", "world_size=6 or 9", "tp=1, 2, 4 or 8"]),
    ((2,), {"tp": 4}, ["world_size=2 is not a multiple of tp=4", "use world_size=4", "tp=1 or 2"]),
    ((7,), {"tp": 2, "cp": 2, "pp": 3}, ["tp=2 * cp=2 * pp=3 = 12", "use world_size=12"]),
    ((8,), {"ep": 3}, ["ep=3", "ep=1, 2, 4 or 8"]),
    ((8,), {"tp": 0}, ["tp=0 must be an integer of at least 1; use 1, 2, 4 or 8"]),
    ((8,), {"pp": -2}, ["pp=-2 must be", "1, 2, 4 or 8"]),
    ((8,), {"cp": 2.0}, ["cp=2.0 must be an integer", "1, 2, 4 or 8"]),
    ((8,), {"tp": "2"}, ["tp='2' must be an integer"]),
    ((8,), {"ep": True}, ["ep=True must be an integer"]),
    ((8,), {"tp": None}, ["tp=None must be an integer"]),
    ((0,), {"tp": 2}, ["world_size=0 must be an integer of at least 1; use 2"]),
    ((-4,), {}, ["world_size=-4 must be an integer of at least 1; use 1"]),
    ((True,), {}, ["world_size=True must be an integer"]),
    ((8.0,), {"tp": 2, "pp": 2}, ["world_size=8.0 must be an integer of at least 1; use 4"]),
    ((8,), {"tp": 2, "pp": 2, "order": "tp-dp"}, ["leaves out 'pp', whose size is 2; use e.g. 'tp-dp-pp'"]),
    ((8,), {"order": "tp-pp"}, ["leaves out 'dp', whose size is 8; use e.g. 'tp-pp-dp'"]),
    ((8,), {"tp": 2, "order": "tp-dp-tp"}, ["names 'tp' more than once; use e.g. 'tp-dp'"]),
    ((8,), {"tp": 2, "order": "tp-xp-dp"}, ["no such axis 'xp'", "tp, cp, ep, dp, pp", "use e.g. 'tp-dp'"]),
    ((8,), {"tp": 2, "order": "tp,dp"}, ["no such axis 'tp,dp'", "use e.g. 'tp-dp'"]),
    ((1,), {"order": ""}, ["no such axis ''", f"use e.g. '{DEFAULT}'"]),
    ((8,), {"order": ["tp", "dp"]}, ["must be a string of axes", DEFAULT]),
    # several faults: all of them in one error
    ((8,), {"tp": 0, "pp": 3}, ["tp=0 must be", "world_size=8 is not a multiple of pp=3"]),
    ((9,), {"tp": 2, "cp": -1, "ep": "a", "order": "tp-tp-zp"}, ["cp=-1", "ep='a'", "world_size=9", "'zp'", "'tp' more than"]),
    ((0,), {"tp": 0, "pp": 3, "order": "tp"}, ["world_size=0", "tp=0", "leaves out 'pp'"]),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "options", "phrases"), BAD, ids=lambda value: str(value)[:50])
def test_faults_name_sizes_and_a_legal_alternative(
    arguments: tuple[Any, ...], options: dict[str, Any], phrases: list[str]
) -> None:
    with pytest.raises(ValueError) as caught:
        Grid(*arguments, **options)
    assert not [phrase for phrase in phrases if phrase not in str(caught.value)], caught.value
    assert all("use" in line for line in str(caught.value).splitlines()[1:])


def test_what_an_error_proposes_works() -> None:
    """Every single remedy named for a world that does not divide is really one, and none is forgotten."""
    for world in range(1, 33):
        for tp, pp in ((2, 4), (3, 2), (4, 4), (5, 1), (6, 3)):
            if world % (tp * pp) == 0:
                continue
            with pytest.raises(ValueError) as caught:
                Grid(world, tp=tp, pp=pp)
            remedies = str(caught.value).split("; use ")[1]
            proposed = {name: set(map(int, re.findall(r"\d+", values)))
                        for name, values in re.findall(r"(world_size|tp|pp)=([^a-z]*(?:or \d+)?)", remedies)}  # fmt: skip
            for size in proposed["world_size"]:
                Grid(size, tp=tp, pp=pp)
            legal_tp = {size for size in range(1, world + 1) if world % (size * pp) == 0} if tp > 1 else set()
            legal_pp = {size for size in range(1, world + 1) if world % (size * tp) == 0} if pp > 1 else set()
            assert proposed.get("tp", set()) == legal_tp
            assert proposed.get("pp", set()) == legal_pp


@pytest.mark.parametrize("rank", [-1, 16, True, 1.0, "3", None])
def test_ranks_outside_the_grid(rank: Any) -> None:
    with pytest.raises(ValueError, match=r"is not in this grid; its ranks are the integers 0\.\.15"):
        Grid(16, tp=2, pp=4).coordinates(rank)
    if rank is not None:  # None selects nobody
        with pytest.raises(ValueError, match="is not in this grid"):
            Grid(16, tp=2, pp=4).svg(selected_rank=rank)


def test_coordinates_outside_the_grid_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"tp=2 is outside tp of size 2; use an integer in 0\.\.1") as caught:
        Grid(16, tp=2, pp=4).rank_at(tp=2, cp=-1, dp=True, pp=3)
    assert [line.split()[0] for line in str(caught.value).splitlines()[1:]] == ["tp=2", "cp=-1", "dp=True"]


@pytest.mark.parametrize("axes", ["", "xp", "tp-tp", "tp-", "tp pp", None, 3])
def test_unknown_groups(axes: Any) -> None:
    with pytest.raises(ValueError, match="must be one axis or different axes joined by '-'"):
        Grid(16, tp=2, pp=4).groups(axes)


@pytest.mark.parametrize("ranks_per_node", [0, -8, True, 8.0, "8"])
def test_impossible_nodes(ranks_per_node: Any) -> None:
    with pytest.raises(ValueError, match=r"ranks_per_node=.* must be an integer of at least 1, e\.g\. 8"):
        Grid(16).svg(ranks_per_node=ranks_per_node)


# ---- table and picture -------------------------------------------------------------------------------------------------------


def test_table() -> None:
    assert (
        str(Grid(16, tp=2, pp=4))
        == """\
16 ranks: tp=2 dp=2 pp=4, order tp-cp-ep-dp-pp

      dp 0        dp 1
      tp 0  tp 1  tp 0  tp 1
pp 0     0     1     2     3
pp 1     4     5     6     7
pp 2     8     9    10    11
pp 3    12    13    14    15"""
    )
    assert (
        str(Grid(8, tp=2, cp=2, pp=2, order="pp-tp-cp"))
        == """\
8 ranks: tp=2 cp=2 pp=2, order pp-tp-cp-dp-ep

            tp 0  tp 1
pp 0  cp 0     0     2
pp 0  cp 1     4     6
pp 1  cp 0     1     3
pp 1  cp 1     5     7"""
    )
    assert str(Grid(1)) == "1 rank: every axis has size 1, order tp-cp-ep-dp-pp\n\n  0"


@pytest.mark.parametrize(
    "grid", [Grid(64), Grid(64, tp=8, pp=2), Grid(128, tp=32), Grid(96, tp=2, cp=2, ep=3, pp=4)], ids=str
)
def test_a_wide_table_continues_below_and_shows_every_rank_once(grid: Grid) -> None:
    lines = str(grid).splitlines()
    assert max(map(len, lines)) <= 120
    cells = [line for line in lines[1:] if line and not re.match(r" *(dp|ep|tp) ", line)]
    numbers = [int(n) for line in cells for n in re.sub(r"(pp|cp) *\d+", "", line).split()]
    assert sorted(numbers) == list(range(grid.world_size))


SVG = "{http://www.w3.org/2000/svg}"
PICTURES = [
    (Grid(1), 0, None),
    (Grid(4, tp=2, pp=2), None, None),
    (Grid(16, tp=2, pp=4), 5, 8),
    (Grid(16, tp=2, pp=4, order="pp-dp-tp"), 5, 8),
    (Grid(32, tp=2, cp=2, pp=4), 5, 6),
    (Grid(64, tp=8, pp=2), 5, 8),
    (Grid(64), 7, 8),
    (Grid(96, tp=2, cp=2, ep=3, pp=4), 50, 8),
]


def texts_of(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter(f"{SVG}text")]


@pytest.mark.parametrize(("grid", "rank", "per_node"), PICTURES, ids=lambda value: repr(value)[:70])
def test_picture_follows_the_rules_of_the_course(grid: Grid, rank: int | None, per_node: int | None) -> None:
    svg = grid.svg(rank, per_node)
    assert svg == grid.svg(rank, per_node)
    picture = ElementTree.fromstring(svg)
    assert picture.get("width") == "760"
    assert [child.tag for child in picture if child.tag in (f"{SVG}title", f"{SVG}desc")] == [
        f"{SVG}title",
        f"{SVG}desc",
    ]
    assert sorted(t for t in texts_of(picture) if re.fullmatch(r"r\d+", t)) == sorted(
        f"r{r}" for r in range(grid.world_size)
    )
    for tag in re.findall(r"<[a-z][^>]*>", svg):
        names = re.findall(r' ([a-z0-9A-Z-]+)="', tag)
        assert names == sorted(names)
    _, _, width, height = map(int, picture.get("viewBox", "").split())
    for element in picture.iter():
        for name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height"):
            value = element.get(name)
            if value is not None:
                limit = width if name in ("x", "x1", "x2", "cx", "width") else height
                assert 0 <= int(value) <= limit, (element.tag, name, value)  # int: the coordinates are whole numbers


Box = tuple[int, int, int, int]  # left, upper, right, lower edge


def box_of(rect: ElementTree.Element) -> Box:
    x, y, width, height = (int(rect.get(name, "")) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


def cells_of(picture: ElementTree.Element) -> dict[int, Box]:
    """Rank -> its cell, the rectangle before its name."""
    return {
        int(name.text[1:]): box_of(rect)
        for rect, name in pairwise(picture)
        if name.tag == f"{SVG}text" and name.text and re.fullmatch(r"r\d+", name.text)
    }


def test_cells_lie_as_the_course_says() -> None:
    grid = Grid(96, tp=2, cp=2, ep=3, pp=4)
    cells = cells_of(ElementTree.fromstring(grid.svg()))
    assert len(set(cells.values())) == grid.world_size

    def neighbours(axis: str) -> list[tuple[Box, Box]]:
        return [(cells[a], cells[b]) for group in grid.groups(axis) for a, b in pairwise(group)]

    for (_, upper, right, _), (left, next_upper, _, _) in neighbours("tp"):
        assert (left, next_upper) == (right, upper)  # touching, side by side
    for (left, _, _, lower), (next_left, upper, _, _) in neighbours("cp"):
        assert (next_left, upper) == (left, lower)  # touching, one above the other
    for (left, _, _, lower), (next_left, upper, _, _) in neighbours("pp"):
        assert next_left == left
        assert upper > lower + 20
    for axis in ("ep", "dp"):
        for (_, upper, right, _), (left, next_upper, _, _) in neighbours(axis):
            assert (
                next_upper == upper and left > right + 10
            ) or next_upper > upper  # to the right, or in the next band


def test_picture_shows_the_groups_of_the_selected_rank() -> None:
    picture = ElementTree.fromstring(Grid(16, tp=2, pp=4).svg(selected_rank=5, ranks_per_node=8))
    texts = texts_of(picture)
    assert "tp (tensor), 2 ranks: r4 r5, inside one node" in texts
    assert "dp (data), 2 ranks: r5 r7, inside one node" in texts
    assert "pp (pipeline), 4 ranks: r1 r5 r9 r13, 1 of 3 links between nodes: slow" in texts
    assert texts.count("slow") == 1
    assert [text for text in texts if text.startswith("node")] == ["node 0", "node 1"]
    stops = [circle.get("fill") for circle in picture.iter(f"{SVG}circle")]
    assert stops == ["#0072B2"] * 2 + ["#CC79A7"] * 2 + ["#222222"] * 4
    assert [text.text for text in picture.iter(f"{SVG}text") if text.get("font-weight") == "bold"][1:] == ["r5"]


@pytest.mark.parametrize(("order", "slow"), [("tp-dp-pp", 4), ("tp-pp-dp", 8), ("pp-dp-tp", 8)])
def test_slow_links_depend_on_the_order(order: str, slow: int) -> None:
    """16 ranks in two nodes: over the slow link go 4 of 12 pipeline hops, or all 8 dp groups, or all 8 tp groups."""
    grid = Grid(16, tp=2, pp=4, order=order)
    counted = set()
    for axis in ("tp", "dp", "pp"):
        counted |= {(a, b) for group in grid.groups(axis) for a, b in pairwise(group) if a // 8 != b // 8}
    assert len(counted) == slow
    for a, b in counted:
        assert texts_of(ElementTree.fromstring(grid.svg(a, 8))).count("slow") >= 1
        assert texts_of(ElementTree.fromstring(grid.svg(b, 8))).count("slow") >= 1


@pytest.mark.parametrize(
    ("grid", "per_node"),
    [
        (Grid(16, tp=2, pp=4), 8),
        (Grid(32, tp=2, cp=2, pp=4), 6),
        (Grid(64), 8),
        (Grid(16, tp=4, pp=2), 3),
        (Grid(8, tp=8), 2),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_node_boxes_hold_just_their_ranks(grid: Grid, per_node: int) -> None:
    """Every rank is in one box, its node's, also where the ranks of a node do not lie in one rectangle; no two boxes overlap."""
    picture = ElementTree.fromstring(grid.svg(ranks_per_node=per_node))
    inside: dict[int, list[int]] = {rank: [] for rank in range(grid.world_size)}
    boxes = []
    for rect, label in pairwise(picture):
        if rect.get("stroke-dasharray") == "6 4" and rect.tag == f"{SVG}rect":
            left, upper, right, lower = box_of(rect)
            boxes.append((left, upper, right, lower))
            for rank, (x1, y1, x2, y2) in cells_of(picture).items():
                if left < (x1 + x2) / 2 < right and upper < (y1 + y2) / 2 < lower:
                    inside[rank].append(int((label.text or "").split()[1]))
    assert inside == {rank: [rank // per_node] for rank in range(grid.world_size)}
    for (l1, u1, r1, b1), (l2, u2, r2, b2) in combinations(boxes, 2):
        assert r1 < l2 or r2 < l1 or b1 < u2 or b2 < u1
