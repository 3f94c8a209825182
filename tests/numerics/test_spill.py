"""Inputs that wait for backward on the host: not a bit changes."""

from dataclasses import replace

import pytest

from megatrain.engine.options import largest_shape, with_tokens_of_a_step
from megatrain.errors import UserError

from .harness import make_config, make_engine, make_rows, reference_model, same_bits, spill_of
from .test_saved import OPTIONS, config_of, trained


@pytest.mark.parametrize("name", ["llama_tied", "gemma4", "gpt2_dropout", "mixtral"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05], ids=["off", "active"])
def test_spilled_inputs_change_no_bit(name: str, max_grad_norm: float) -> None:
    base = replace(OPTIONS, max_grad_norm=max_grad_norm)
    if name == "gpt2_dropout":  # rows run one by one
        spill_all = replace(spill_of(frozenset({1, 2, 3})), num_micro=5)
    else:
        layers = config_of(name).num_hidden_layers
        spill_all = spill_of(frozenset(range(1, layers + 1)))
    expected = trained(name, base)
    for slots in (1, 3):
        spilled = replace(base, spill=replace(spill_all, slots=slots))
        assert same_bits(trained(name, spilled), expected)
    partly = replace(spill_all, blocks=frozenset({2}))
    saved = replace(base, spill=partly, saved=frozenset({1}), threads=True)
    assert same_bits(trained(name, saved, resident=frozenset({0, 2})), expected)


def test_spilled_inputs_beside_frozen_layers() -> None:
    frozen = ["model.embed*", "model.layers.0.*"]
    expected = trained("llama", OPTIONS, frozen=frozen)
    spilled = replace(OPTIONS, spill=spill_of(frozenset({2, 3})))
    assert same_bits(trained("llama", spilled, frozen=frozen), expected)


@pytest.mark.parametrize(
    ("spilled", "saved", "unread"), [({1, 2}, set(), "1"), ({2, 3}, {3}, "3"), ({0, 2}, set(), "0")]
)
def test_inputs_that_no_backward_reads_are_not_spilled(
    spilled: set[int], saved: set[int], unread: str
) -> None:
    options = replace(OPTIONS, spill=spill_of(frozenset(spilled)), saved=frozenset(saved))
    with pytest.raises(UserError, match=f"inputs of blocks {unread}: no backward"):
        trained("llama", options, frozen=["model.embed*", "model.layers.0.*"])


@pytest.mark.parametrize("length_multiple", [1, 8])
@pytest.mark.parametrize("tokens", [5, 24, 30, 1000])
def test_no_step_has_a_larger_micro_batch_than_is_measured(
    tokens: int, length_multiple: int
) -> None:
    config = make_config("llama")
    options = replace(
        OPTIONS,
        micro_batch_tokens=tokens,
        compile_backend="aot_eager",
        length_multiple=length_multiple,
    )
    engine = make_engine(config, dict(reference_model(config).named_parameters()), options=options)
    options = with_tokens_of_a_step(engine.model, options, num_rows=7, longest=12)
    engine._cut = replace(engine._cut, options=options)
    rows, length, num_micro = largest_shape(engine.model, options, num_rows=7, longest=12)
    for seed in range(20):
        batches = engine._cut(make_rows(7, seed), training=True)
        assert len(batches) <= num_micro
        assert max(batch.ids_BT.numel() for batch in batches) <= rows * length
    engine.close()
