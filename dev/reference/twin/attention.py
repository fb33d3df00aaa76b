"""Causal attention inside a window and inside a document, for one packed sequence.

q, k, v, result: [N, H, e]. Query i sees key j when j <= i, documents[i] == documents[j] and i - j <= window.
dense: any device and dtype, sums and probabilities in the wide dtype. flex, flash: GPU, bf16, for the full-size presets.
"""
import torch

BLOCK = 256  # queries of one dense block; bounds the score matrix at BLOCK * (BLOCK + window) per head


def dense(q, k, v, documents, window, scale, wide):
    q, k, v = (x.to(wide).transpose(0, 1) for x in (q, k, v))
    position = torch.arange(q.shape[1], device=q.device)
    out = []
    for begin in range(0, q.shape[1], BLOCK):
        end = min(begin + BLOCK, q.shape[1])
        first = max(0, begin - window)
        distance = position[begin:end, None] - position[None, first:end]
        seen = (distance >= 0) & (distance <= window) & (documents[begin:end, None] == documents[None, first:end])
        scores = scale * (q[:, begin:end] @ k[:, first:end].mT)
        out.append(scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v[:, first:end])
    return torch.cat(out, 1).transpose(0, 1)


class Flex:
    """flex_attention; the block mask is made once for a (sequence, window) and shared by the layers."""

    def __init__(self):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
        self.create = torch.compile(create_block_mask)
        self.kernel = torch.compile(flex_attention)
        self.key, self.masks = None, {}

    def __call__(self, q, k, v, documents, window, scale):
        if self.key is not documents:
            self.key, self.masks = documents, {}
        n = q.shape[0]
        if window not in self.masks:
            def seen(b, h, i, j):
                return (j <= i) & (i - j <= window) & (documents[i] == documents[j])
            self.masks[window] = self.create(seen, None, None, n, n, device=q.device)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return self.kernel(q, k, v, block_mask=self.masks[window], scale=scale)[0].transpose(0, 1)


def flash(q, k, v, cu_seqlens, longest, window, scale):
    """Variable-length flash attention; cu_seqlens I32 [documents + 1] on the device, longest: tokens of the longest document."""
    return torch.ops.aten._flash_attention_forward(q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False,
                                                   scale=scale, window_size_left=window, window_size_right=0)[0]
