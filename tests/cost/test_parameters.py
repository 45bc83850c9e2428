"""Parameters: Narayanan's equation 2 and Table 1, Shoeybi's Table 1, and the shards that a real grid of ranks holds."""

import re

import pytest

from minimeg.cost import MODELS, GPTShape, matrix_parameters, model, parameters, rank_parameters

from .oracles import cases, inputs, rows


def shape_of(i):
    return GPTShape(i["l"], i["h"], 1, i["s"], i["V"])


@pytest.mark.parametrize("test", cases("N1"), ids=inputs)
def test_n1_equation_2(test):
    count = parameters(shape_of(test["inputs"]))
    assert count == test["expected_params"]
    assert round(count / 1e9, 1) == test["expected_rounded_b"]


@pytest.mark.parametrize("row", rows("N1"), ids=lambda row: str(row["params_b"]))
def test_n1_the_models_by_name_are_those_of_table_1(row):
    found = [m for m in MODELS.values() if m.source.startswith("Narayanan") and m.source.endswith("Table 1")]
    (named,) = [m for m in found if parameters(m.shape) == row["params_exact_derived"]]
    assert (named.shape.heads, named.global_batch) == (row["heads"], row["batch"])
    assert row["dp_derived"] * row["tp"] * row["pp"] == row["gpus"]


def test_n1_equation_2_as_it_is_printed():
    for named in MODELS.values():
        length, h, v, s = named.shape.layers, named.shape.hidden, named.shape.vocabulary, named.shape.sequence
        printed = 12 * length * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * length * h))
        assert parameters(named.shape) == pytest.approx(printed, rel=1e-12)


@pytest.mark.parametrize(
    ("layers", "prose", "equation"), [(3, 15.10, 16.19), (24, 120.80, 121.89), (32, 161.06, 162.16)]
)
def test_n1_prose_leaves_out_embeddings(layers, prose, equation):
    shape = GPTShape(layers, 20480, 128)
    assert round(matrix_parameters(shape) / 1e9, 2) == prose
    assert matrix_parameters(shape) == 12 * layers * 20480**2
    assert round(parameters(shape) / 1e9, 2) == equation


def test_n1_the_final_norm_is_not_in_the_equation():
    shape = model("1t").shape
    assert parameters(shape, final_norm=True) - parameters(shape) == 2 * shape.hidden


@pytest.mark.parametrize("test", [t for t in cases("S1") if isinstance(t["inputs"], dict)], ids=inputs)
def test_s1_shoeybi_table_1(test):
    count = parameters(shape_of(test["inputs"]))
    assert count == test["expected"]
    assert round(count / 1e9, 1) == test["expected_rounded_b"]


@pytest.mark.parametrize("row", rows("S1"), ids=lambda row: str(row["params_b"]))
def test_s1_the_models_by_name(row):
    shape = model(f"{row['params_b']}b").shape
    assert parameters(shape) == row["params_exact_derived"]
    assert (shape.heads, shape.hidden // shape.heads, shape.sequence) == (row["heads"], 96, 1024)


# ---- COURSE 00: the surplus of four ranks ------------------------------------------------------------------------------------

COUNTING = GPTShape(layers=4, hidden=32, heads=4, sequence=16, vocabulary=64)


def test_course_00_four_ranks_hold_more_than_one():
    whole = parameters(COUNTING, final_norm=True)
    assert whole == 53_440
    assert [rank_parameters(COUNTING, 2, 2, stage) for stage in (0, 1)] == [14_432, 13_984]
    together = 2 * (14_432 + 13_984)
    tied_copy, norms_and_biases, positions, final_norm = 64 * 32, 4 * 6 * 32, 16 * 32, 2 * 32
    assert together - whole == tied_copy + norms_and_biases + positions + final_norm == 3_392


def test_one_rank_holds_all():
    for named in MODELS.values():
        assert rank_parameters(named.shape, 1, 1, 0) == parameters(named.shape, final_norm=True)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 4), (4, 2), (8, 4)])
def test_the_ranks_of_a_grid_hold_all_once_and_what_is_replicated_t_times(tensor, pipeline):
    shape = GPTShape(layers=8, hidden=64, heads=8, sequence=32, vocabulary=128)
    held = tensor * sum(rank_parameters(shape, tensor, pipeline, stage) for stage in range(pipeline))
    replicated = 8 * 6 * 64 + 32 * 64 + 2 * 64
    tied_copy = 128 * 64 if pipeline > 1 else 0
    assert held == parameters(shape, final_norm=True) + (tensor - 1) * replicated + tied_copy


def test_the_vocabulary_is_padded_up():
    shape = GPTShape(1, 8, 4, 4, 10)
    assert rank_parameters(shape, 4, 1, 0) - rank_parameters(GPTShape(1, 8, 4, 4, 12), 4, 1, 0) == 0


# ---- refusals ----------------------------------------------------------------------------------------------------------------


def test_a_shape_names_all_its_faults():
    with pytest.raises(ValueError, match=r"layers=0 .*\n.*vocabulary=-1 "):
        GPTShape(0, 64, 4, vocabulary=-1)
    with pytest.raises(ValueError, match=r"hidden=65 is not a multiple of heads=4; use hidden=68"):
        GPTShape(2, 65, 4)


def test_a_split_that_does_not_divide():
    with pytest.raises(ValueError, match=r"tensor=3 does not divide hidden=64.*\n.*tensor=3 does not divide heads=8"):
        rank_parameters(GPTShape(4, 64, 8), 3, 2, 0)
    with pytest.raises(ValueError, match=r"pipeline=3 does not divide layers=4.*\n.*stage=3 must be from 0 to 2"):
        rank_parameters(GPTShape(4, 64, 8), 1, 3, 3)


def test_unknown_model():
    with pytest.raises(ValueError, match=re.escape("'gpt5' is unknown; use one of 1.2b")):
        model("gpt5")
    assert model("GPT3-175B") is model("gpt3-175b")
