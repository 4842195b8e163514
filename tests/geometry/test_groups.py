"""The groups are groups, and their grids are what they say."""

from __future__ import annotations

import itertools
import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

import headtilt as ht
from headtilt.errors import OptionError
from headtilt.geometry.groups import OneParameterGroup, check_levels, identity_index
from headtilt.geometry.warp import invert
from tests.toys import exact

EYE = torch.eye(3, dtype=torch.float64)
ONE_PARAMETER = {
    "rotation": ht.rotation(),
    "rotation within 60°": ht.rotation(math.pi / 3),
    "scale": ht.scale(0.25),
    "shear_x": ht.shear_x(0.25),
    "shear_y": ht.shear_y(0.25),
    "shear along 40°": ht.shear(0.3, math.radians(40)),
    "translate_x": ht.translate_x(0.25),
    "translate_y": ht.translate_y(0.25),
    "translate along 115°": ht.translate(0.3, math.radians(115)),
}
every_group = pytest.mark.parametrize("group", ONE_PARAMETER.values(), ids=ONE_PARAMETER.keys())
bounded_groups = pytest.mark.parametrize(
    "group",
    [g for g in ONE_PARAMETER.values() if not g.periodic],
    ids=[k for k, g in ONE_PARAMETER.items() if not g.periodic],
)
parameters = st.floats(-3, 3, allow_nan=False)


# --- axioms -----------------------------------------------------------------------------------------------------------


@every_group
@given(s=parameters, t=parameters)
def test_composition_stays_in_the_group_and_adds_the_parameters(group, s, t):
    # torch.matrix_exp of a single matrix is good to a few 1e-11 only.
    assert_close(group.matrix(exact(s)) @ group.matrix(exact(t)), group.matrix(exact(s + t)), rtol=1e-9, atol=1e-9)


@every_group
def test_parameter_zero_is_exactly_the_identity(group):
    assert torch.equal(group.matrix(exact(0.0)), EYE)


@every_group
@given(t=parameters)
def test_an_element_times_its_inverse_is_the_identity_from_both_sides(group, t):
    element, inverse = group.matrix(exact(t)), group.inverse(exact(t))
    assert_close(element @ inverse, EYE, rtol=0, atol=1e-9)
    assert_close(inverse @ element, EYE, rtol=0, atol=1e-9)


@every_group
@given(t=st.floats(0.01, 3))
def test_no_element_but_the_identity_is_the_identity(group, t):
    """Guards the axioms above, which a map that always returns the identity would pass."""
    assert float((group.matrix(exact(t)) - EYE).norm()) > 0.9 * t


@given(choice=st.lists(st.sampled_from(list(ONE_PARAMETER)), min_size=3, max_size=3), t=st.tuples(*[parameters] * 3))
def test_composition_is_associative_across_groups(choice, t):
    a, b, c = (ONE_PARAMETER[name].matrix(exact(value)) for name, value in zip(choice, t, strict=True))
    assert_close((a @ b) @ c, a @ (b @ c), rtol=1e-10, atol=1e-10)


@every_group
@given(t=parameters)
def test_matrices_are_affine_and_only_scale_changes_the_area(group, t):
    matrix = group.matrix(exact(t))
    assert_close(matrix[2], EYE[2], rtol=0, atol=1e-15)
    assert_close(
        torch.linalg.det(matrix), exact(math.exp(2 * t) if group.name == "scale" else 1.0), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (ht.rotation(), lambda t: [[math.cos(t), -math.sin(t), 0], [math.sin(t), math.cos(t), 0], [0, 0, 1]]),
        (ht.scale(), lambda t: [[math.exp(t), 0, 0], [0, math.exp(t), 0], [0, 0, 1]]),
        (ht.shear_x(), lambda t: [[1, t, 0], [0, 1, 0], [0, 0, 1]]),
        (ht.shear_y(), lambda t: [[1, 0, 0], [t, 1, 0], [0, 0, 1]]),
        (ht.translate_x(), lambda t: [[1, 0, t], [0, 1, 0], [0, 0, 1]]),
        (ht.translate_y(), lambda t: [[1, 0, 0], [0, 1, t], [0, 0, 1]]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@given(t=parameters)
def test_the_exponential_is_the_closed_form(group, expected, t):
    assert_close(group.matrix(exact(t)), torch.tensor(expected(t), dtype=torch.float64), rtol=1e-9, atol=1e-9)


@given(angle=st.floats(-7, 7), t=parameters)
def test_a_shear_along_a_direction_is_the_horizontal_one_turned_there(angle, t):
    turn, back = ht.rotation().matrix(exact(angle)), ht.rotation().matrix(exact(-angle))
    assert_close(ht.shear(0.3, angle).matrix(exact(t)), turn @ ht.shear_x().matrix(exact(t)) @ back, rtol=0, atol=1e-9)


@given(angle=st.floats(-7, 7), t=parameters, distance=st.floats(-2, 2))
def test_a_shear_keeps_its_direction_and_moves_points_beside_it_by_their_distance(angle, t, distance):
    along = torch.tensor([math.cos(angle), math.sin(angle), 0], dtype=torch.float64)
    beside = torch.tensor([-math.sin(angle), math.cos(angle), 0], dtype=torch.float64)
    matrix = ht.shear(0.3, angle).matrix(exact(t))
    assert_close(matrix @ along, along, rtol=0, atol=1e-12)
    assert_close(matrix @ (distance * beside), distance * beside + t * distance * along, rtol=0, atol=1e-11)


@given(angle=st.floats(-7, 7), t=parameters)
def test_a_translation_goes_along_its_direction_by_its_parameter(angle, t):
    origin = torch.tensor([0, 0, 1], dtype=torch.float64)
    moved = ht.translate(0.3, angle).matrix(exact(t)) @ origin
    assert_close(
        moved, torch.tensor([t * math.cos(angle), t * math.sin(angle), 1], dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_direction_zero_is_x_and_a_quarter_turn_is_y():
    t = exact(0.2)
    assert_close(ht.shear(0.3).matrix(t), ht.shear_x(0.3).matrix(t))
    assert_close(ht.translate(0.3).matrix(t), ht.translate_x(0.3).matrix(t))
    assert_close(ht.translate(0.3, math.pi / 2).matrix(t), ht.translate_y(0.3).matrix(t))
    # Turned clockwise, "the lower half to the right" becomes "the left half downwards": the vertical shear backwards.
    assert_close(ht.shear(0.3, math.pi / 2).matrix(t), ht.shear_y(0.3).matrix(-t))


@every_group
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,)])
def test_matrices_keep_the_shape_and_dtype_of_the_parameters(group, dtype, shape):
    t = torch.full(shape, 0.25, dtype=dtype)
    for made in (group.matrix(t), group.inverse(t)):
        assert made.shape == (*shape, 3, 3)
        assert made.dtype == dtype


def test_plain_numbers_and_integers_give_the_default_dtype():
    assert ht.rotation().matrix(0.5).dtype == torch.float32
    assert ht.translate_x().matrix(torch.tensor([1, 2])).dtype == torch.float32
    assert ht.translate_x().matrix(torch.tensor([1, 2]))[:, 0, 2].tolist() == [1.0, 2.0]
    assert ht.reflection().matrix(torch.tensor([1, 2])).dtype == torch.float32
    assert ht.reflection().matrix(torch.ones(2, dtype=torch.float64)).dtype == torch.float64


def test_single_precision_matrices_are_rounded_from_exact_ones():
    t = torch.linspace(-3, 3, 50)
    assert torch.equal(ht.rotation().matrix(t), ht.rotation().matrix(t.double()).float())


def test_reflection_is_the_klein_four_group():
    orbit = ht.reflection().orbit()
    assert torch.equal(orbit[0], EYE)
    for first, second in itertools.product(range(4), repeat=2):
        assert torch.equal(orbit[first] @ orbit[second], orbit[first ^ second])
    assert torch.equal(orbit @ ht.reflection().inverse(torch.arange(4.0)).double(), EYE.expand(4, 3, 3))
    assert [matrix.diagonal().tolist() for matrix in orbit] == [[1, 1, 1], [-1, 1, 1], [1, -1, 1], [-1, -1, 1]]


@pytest.mark.parametrize("n", [1, 2, 4, 17])
def test_reflection_always_has_its_four_elements_identity_first(n):
    assert ht.reflection().grid(n).tolist() == [0, 1, 2, 3]
    assert ht.reflection().orbit(n).shape == (4, 3, 3)
    assert identity_index(ht.reflection(), 4) == 0


def test_groups_are_values():
    assert ht.rotation() == ht.rotation()
    assert ht.scale(0.25) != ht.scale(0.3)
    assert len({ht.shear_x(), ht.shear_x(), ht.reflection(), ht.reflection()}) == 2
    with pytest.raises(FrozenInstanceError):
        ht.rotation().low = 0.0


# --- grids ------------------------------------------------------------------------------------------------------------


@bounded_groups
@pytest.mark.parametrize("n", [3, 5, 9, 17])
def test_bounded_grids_are_symmetric_even_and_reach_both_ends(group, n):
    grid = group.grid(n)
    assert grid.dtype == torch.float64
    assert_close(grid, torch.linspace(group.low, group.high, n, dtype=torch.float64), rtol=0, atol=1e-14)
    assert torch.equal(grid, -grid.flip(0))


@every_group
@pytest.mark.parametrize("n", [1, 3, 9, 17])
def test_grids_hold_the_identity_at_the_documented_index(group, n):
    assert identity_index(group, n) == n // 2
    assert float(group.grid(n)[n // 2]) == 0.0
    assert torch.equal(group.orbit(n)[n // 2], EYE)
    assert torch.equal(group.orbit(n), group.matrix(group.grid(n)))


@bounded_groups
@given(half=st.integers(0, 10))
def test_bounded_grids_hold_the_inverse_of_every_element(group, half):
    orbit = group.orbit(2 * half + 1)
    assert_close(orbit @ orbit.flip(0), EYE.expand_as(orbit), rtol=0, atol=1e-12)


@given(n=st.integers(1, 40))
def test_a_full_turn_may_have_any_count_and_never_holds_an_element_twice(n):
    orbit = ht.rotation().orbit(n)
    assert torch.equal(orbit[n // 2], EYE)
    apart = (orbit[:, None] - orbit[None]).flatten(2).norm(dim=-1) + 10 * torch.eye(n)
    # Chord between neighbours on a turn of n, in the Frobenius norm of two equal columns.
    assert float(apart.min()) > 0.99 * min(2 * math.sqrt(2) * math.sin(math.pi / n), 10) or n == 1


@given(n=st.integers(1, 24), first=st.integers(0, 23), second=st.integers(0, 23))
def test_the_samples_of_a_full_turn_are_themselves_a_group(n, first, second):
    orbit = ht.rotation().orbit(n)
    product = orbit[first % n] @ orbit[second % n]
    assert float((orbit - product).flatten(1).norm(dim=1).min()) < 1e-12
    inverse = invert(orbit[first % n])
    assert float((orbit - inverse).flatten(1).norm(dim=1).min()) < 1e-12


def test_a_full_turn_drops_its_end_point():
    assert_close(ht.rotation().grid(4), torch.tensor([-math.pi, -math.pi / 2, 0, math.pi / 2], dtype=torch.float64))
    assert float(ht.rotation().grid(17).abs().max()) == pytest.approx(2 * math.pi * 8 / 17)


def test_a_partial_turn_is_bounded_and_keeps_its_ends():
    assert not ht.rotation(3.0).periodic
    assert ht.rotation(3.0).grid(3).tolist() == [-3.0, 0.0, 3.0]


@pytest.mark.parametrize("s", [0.1, 0.25, 0.5, 0.9])
def test_scale_runs_from_one_minus_s_to_its_inverse(s):
    group = ht.scale(s)
    factors = group.orbit(9)[:, 0, 0]
    assert float(factors[0]) == pytest.approx(1 - s)
    assert float(factors[-1]) == pytest.approx(1 / (1 - s))
    for perturbation in (1 - s, 1 + s):
        assert group.low - 1e-12 <= -math.log(perturbation) <= group.high + 1e-12
    assert_close(factors[1:] / factors[:-1], (factors[1] / factors[0]).expand(8))


@every_group
@pytest.mark.parametrize("n", [3, 9, 17])
def test_powers_of_the_generator_give_the_grid(group, n):
    generator = group.generator(n)
    powers = torch.stack([torch.linalg.matrix_power(generator, k - n // 2) for k in range(n)])
    assert_close(powers, group.orbit(n), rtol=0, atol=1e-8)


@pytest.mark.parametrize("n", [3, 4, 17, 24])
def test_the_generator_of_a_full_turn_is_cyclic(n):
    assert_close(torch.linalg.matrix_power(ht.rotation().generator(n), n), EYE, rtol=0, atol=1e-12)


@every_group
def test_reach_is_the_larger_end(group):
    assert group.reach == max(-group.low, group.high)


# --- the paper's grids ------------------------------------------------------------------------------------------------


def test_the_papers_rotation_grid_holds_both_ends_and_never_wraps():
    group = ht.rotation().paper()
    assert not group.periodic
    assert_close(group.grid(17), torch.linspace(-math.pi, math.pi, 17, dtype=torch.float64))
    assert_close(group.orbit(17)[0], group.orbit(17)[-1], rtol=0, atol=1e-12)


def test_the_papers_scale_grid_has_even_factors_and_lacks_its_inverses():
    group = ht.scale(0.25).paper()
    factors = group.orbit(17)[:, 0, 0]
    assert_close(factors, torch.linspace(0.75, 1.25, 17, dtype=torch.float64), rtol=0, atol=1e-12)
    assert float(1 / factors[0]) > float(factors.max()) + 0.08
    assert_close(group.generator(17)[0, 0], exact(1 + 0.25 / 8), rtol=0, atol=1e-9)


@every_group
def test_the_papers_grid_holds_the_identity_in_the_middle_and_is_its_own_papers_grid(group):
    paper = group.paper()
    assert float(paper.grid(17)[8]) == 0.0
    assert_close(paper.paper().grid(17), paper.grid(17))


def test_the_papers_grids_of_the_other_groups_are_the_same():
    for group in (ht.shear_x(), ht.translate_y(), ht.shear(0.2, 1.0)):
        assert torch.equal(group.paper().grid(17), group.grid(17))
    assert ht.reflection().paper() == ht.reflection()


def test_a_grid_with_uneven_ends_keeps_zero_in_the_middle():
    group = OneParameterGroup("lopsided", ((0, 0, 1), (0, 0, 0), (0, 0, 0)), -1.0, 3.0)
    assert_close(group.grid(5), torch.tensor([-1, -0.5, 0, 1.5, 3], dtype=torch.float64))


def test_check_levels_accepts_any_mixture_of_groups():
    check_levels([ht.rotation(), ht.reflection(), ht.scale().paper()], 17)


# --- theorem "Group Elimination" --------------------------------------------------------------------------------------


@given(
    commuting=st.lists(st.tuples(st.sampled_from(["rotation", "scale"]), st.floats(-2, 2)), min_size=1, max_size=4),
    rest=st.lists(st.tuples(st.sampled_from(sorted(ONE_PARAMETER)), st.floats(-1, 1)), max_size=3),
)
def test_an_inverse_eliminates_its_element_behind_commuting_ones(commuting, rest):
    """g_k⁻¹ s = s without g_k, if everything in front of g_k commutes with it; what stands behind does not matter."""
    front = [ONE_PARAMETER[name].matrix(exact(t)) for name, t in commuting[:-1]]
    behind = [ONE_PARAMETER[name].matrix(exact(t)) for name, t in rest]
    name, t = commuting[-1]
    sequence = torch.linalg.multi_dot([EYE, EYE, *front, ONE_PARAMETER[name].matrix(exact(t)), *behind])
    without = torch.linalg.multi_dot([EYE, EYE, *front, *behind])
    assert_close(ONE_PARAMETER[name].inverse(exact(t)) @ sequence, without, rtol=1e-9, atol=1e-9)


@given(shear=st.floats(0.1, 1), turn=st.floats(0.2, math.pi - 0.2))
def test_an_inverse_does_not_eliminate_its_element_behind_one_that_does_not_commute(shear, turn):
    in_front, element = ht.shear_x().matrix(exact(shear)), ht.rotation().matrix(exact(turn))
    left_over = ht.rotation().inverse(exact(turn)) @ in_front @ element
    assert float((left_over - in_front).norm()) > 0.01


@pytest.mark.parametrize(("field", "value"), [("name", {"a": 1}), ("periodic", "yes"), ("spacing", "odd")])
def test_a_group_with_a_field_of_another_kind_is_refused_by_name(field, value):
    with pytest.raises(OptionError, match=field):
        replace(ht.rotation(), **{field: value})
