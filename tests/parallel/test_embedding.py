"""Gradients of tables of which one row is used many times."""

import pytest
import torch

from ds_engine.parallel.embedding import VocabParallelEmbedding, look_up
from ds_engine.parallel.parameter import normal
from ds_engine.parallel.tensor_parallel import TensorParallel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_used_thousands_of_times_gets_its_whole_gradient(dtype):
    """A sum in bf16 stands still after some hundred equal terms."""
    index = torch.arange(4096).reshape(2, -1) % 2
    table = torch.randn(3, 4).to(dtype).requires_grad_()
    found = look_up(index, table)
    assert torch.equal(found, table.detach()[index])
    found.backward(torch.full_like(found, 0.01))
    expected = torch.tensor([20.48, 20.48, 0.0])[:, None].expand(3, 4)
    torch.testing.assert_close(table.grad.float(), expected, rtol=1e-2, atol=0.0)


def test_the_word_table_too():
    words = VocabParallelEmbedding(3, 4, 8, TensorParallel.single(), normal(0.02)).bfloat16()
    torch.nn.init.ones_(words.weight)
    words(torch.ones(1, 4096, dtype=torch.long)).sum().backward()
    assert words.weight.grad[:, 0].tolist() == [0, 4096, 0, 0]
