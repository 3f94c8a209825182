"""Attention with sinks by the flash kernel: as all scores in fp32 say, and in whole steps."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatrain.engine import EngineOptions
from megatrain.models.flash_sinks import causal_with_sinks
from megatrain.models.sinks import FUSED_SINKS
from tests.numerics.harness import (
    ADAMW,
    Reference,
    assert_close,
    gradients_of,
    make_engine,
    make_rows,
)
from tests.numerics.test_parts import masters_of
from tests.numerics.test_sinks import config_of, with_sinks

from .test_cuda import LEARNING_RATE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

OPTIONS = EngineOptions(adamw=ADAMW, debug=True, micro_batch_rows=2, length_multiple=16)


@pytest.fixture(autouse=True)
def _no_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Inductor, while it is imported
@pytest.mark.parametrize("compiled", [False, True], ids=["as it is", "compiled"])
@pytest.mark.parametrize("window", [0, 1, 17, 500])
@pytest.mark.parametrize("head_dim", [64, 24, 256])
def test_the_kernel_equals_all_scores(head_dim: int, window: int, compiled: bool) -> None:
    """Output and gradients in bfloat16 and by fp32, whose bfloat16 inputs are the same."""
    torch.manual_seed(0)
    tokens, dtype = 237, torch.bfloat16

    def heads(count: int) -> Tensor:  # strided as transformers' are
        return torch.randn(2, count, tokens, head_dim, device="cuda", dtype=dtype).transpose(1, 2)

    given = [heads(8), heads(2), heads(2), 2 * torch.randn(8, device="cuda", dtype=dtype)]
    outgoing = torch.randn(2, tokens, 8, head_dim, device="cuda", dtype=dtype)

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        return causal_with_sinks(query, key, value, sinks, window, head_dim**-0.5)[0]

    found = []
    for precision in (dtype, torch.float32):
        inputs = [each.detach().to(precision).requires_grad_() for each in given]
        call = torch.compile(attend, fullgraph=True) if compiled else attend
        output = call(*inputs)
        found.append([output, *torch.autograd.grad(output, inputs, outgoing.to(precision))])
    for mine, exact in zip(*found, strict=True):
        # bfloat16 keeps 2**-9; with a window of 1 a gradient is the difference of two like numbers.
        assert (mine.float() - exact).norm() < 2e-2 * exact.norm()


@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("parts", [None, 3])
def test_steps_in_fp32_equal_plain_pytorch(parts: int | None, backend: str | None) -> None:
    model = with_sinks("gpt_oss")
    engine = make_engine(
        config_of("gpt_oss", FUSED_SINKS),
        masters_of(model),
        options=replace(OPTIONS, compile_backend=backend),
        device="cuda",
        expert_parts=parts,
    )
    reference = Reference(
        model.cuda(), learning_rate=LEARNING_RATE, max_grad_norm=1.0, rows_per_micro=2
    )
    for seed in range(2):
        rows = make_rows(6, seed)
        expected, result = reference.step(rows), engine.step(rows, learning_rate=LEARNING_RATE)
        assert result.loss == pytest.approx(expected.loss, rel=1e-5)
        assert result.grad_norm == pytest.approx(expected.norm, rel=1e-4)


@pytest.mark.parametrize("parts", [None, 2])
def test_compiled_gradients_in_bf16_are_those_of_eager_attention(parts: int | None) -> None:
    """In fp32 attention has no kernel; here it has, in every layer, with and without a window.

    A token takes all experts: a router that rounding tips over would change what is compared.
    """
    masters, found = masters_of(with_sinks("gpt_oss")), []
    for attention in ("eager", FUSED_SINKS):
        config = config_of("gpt_oss", attention)
        config.num_experts_per_tok = config.num_local_experts
        engine = make_engine(
            config,
            masters,
            options=replace(OPTIONS, compile_backend="inductor"),
            device="cuda",
            compute_dtype="bfloat16",
            expert_parts=parts,
        )
        engine.step(make_rows(6), learning_rate=LEARNING_RATE)
        assert engine.compiler is not None and engine.compiler.notices == []
        found.append(gradients_of(engine))
    assert_close(found[1], found[0], relative=5e-2, what="gradient")
