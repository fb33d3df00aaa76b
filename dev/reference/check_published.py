#!/usr/bin/env python3
"""Compares r2026 with the published program's own classes, in float64 on a CPU: losses and every gradient.

    check_published.py GIT_DIR [89] [90] [mask]

GIT_DIR: a bare copy of github.com/KellerJordan/modded-nanogpt with its pull requests. The classes are read
from there and run with bf16 and fp32 replaced by float64, FP8 off, and the kernels (attention, DC, MLP,
loss) replaced by formulas. "mask" is the last validation of record 91. Prints TAP; exit status 1 on a failure.
"""

import ast
import os
import subprocess
import sys

if "--help" in sys.argv or len(sys.argv) < 2:
    print(__doc__)
    sys.exit(0 if "--help" in sys.argv else 2)

from types import SimpleNamespace

import torch

from r2026 import data, model, record

REFS = {"89": "f411b3d3", "90": "refs/pull/344/head", "mask": "refs/pull/350/head"}
CLASSES = (
    "norm",
    "CastedLinearT",
    "Yarn",
    "AttnArgs",
    "dc_gate",
    "CausalSelfAttention",
    "next_multiple_of_n",
    "ForwardScheduleConfig",
    "GPT",
)
EPS, N, VOCAB, BIGRAMS, SIGNS = 2.0**-23, 192, 500, 997, 64
WINDOWS, OLD_LONG = (32, 64), 40  # the long window was 40 before, so that YaRN has been applied once
REPLACED = (
    ("torch.bfloat16", "torch.float64"),
    ("torch.float32", "torch.float64"),
    (".bfloat16()", ".double()"),
    (".float()", ".double()"),
    ("F.rms_norm(x, (x.size(-1),))", "F.rms_norm(x, (x.size(-1),), eps=2.0 ** -23)"),
    ("torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count", "1"),
    # a compiled program reads all of k before it writes
    ("k[:, :-1, :, self.head_dim // 2:]", "k[:, :-1, :, self.head_dim // 2:].clone()"),
)


# ---- formulas in place of kernels -------------------------------------------------------------------------


def visible(cu_seqlens, n, window):
    document = torch.bucketize(torch.arange(n), cu_seqlens, right=True)
    distance = torch.arange(n)[:, None] - torch.arange(n)[None]
    return (distance >= 0) & (distance <= window) & (document[:, None] == document[None])


def attention(q, k, v, cu_seqlens_q, softmax_scale, window_size, **_):
    scores = softmax_scale * torch.einsum("ihe,jhe->hij", q, k)
    scores = scores.masked_fill(~visible(cu_seqlens_q, len(q), window_size[0]), float("-inf"))
    return torch.einsum("hij,jhe->ihe", scores.softmax(-1), v).contiguous()


def second_softmax(y, q, k, v, weights, _, scaling, window, seq_lens):
    w1, w2 = (w[0] for w in weights)
    seen = visible(seq_lens, q.shape[1], window - 1)
    p = (scaling * torch.einsum("ihe,jhe->hij", q[0], k[0])).masked_fill(~seen, float("-inf")).softmax(-1)
    return y + torch.einsum("ih,ij,jhe->ihe", w2, torch.einsum("ih,hij->ij", w1, p), v[0]).view_as(y)


def norm_and_rotate(qk, factor1, factor2, heads, width, paired, key_offset):
    """qk [N, 2 heads, e] to q and k, [N, heads, e] or, paired, [2N, heads / 2, e]; padded to `width`."""
    n, _, e = qk.shape
    x = qk / (qk.square().mean(-1, keepdim=True) + EPS).sqrt()
    flipped = x.view(n, -1, e // 2, 2).flip(-1).view(x.shape)
    factors = [f.view(n, -1, e).repeat(1, 2 * heads // (f.shape[1] // e), 1) for f in (factor1, factor2)]
    q, k = (factors[0] * x + factors[1] * flipped).split(heads, 1)
    if key_offset and not paired:
        k = torch.cat([k[..., : e // 2], torch.cat([k[:1], k[:-1]])[..., e // 2 :]], -1)
    q, k = (torch.nn.functional.pad(t, (0, width - e)) for t in (q, k))
    return tuple(t.reshape(2 * n, heads // 2, width) for t in (q, k)) if paired else (q, k)


class Mlp:
    @staticmethod
    def apply(x, up, down, *_):
        return torch.relu(x @ up.t()).square() @ down


class Loss:
    @staticmethod
    def apply(x, targets, weights, prefix, prefix_weight, head, *_):
        z = 23 * torch.sigmoid((x @ head + 5) / 7.5)
        lse, losses = z.logsumexp(-1), []
        for t in range(len(z)):
            wanted = [(float(w), targets[t + k]) for k, w in enumerate(weights) if t + k < len(z)]
            wanted += [(float(prefix_weight), prefix[t])] if prefix[t] >= 0 else []
            losses.append(sum(w * (lse[t] - z[t, i]) for w, i in wanted))
        return torch.stack(losses)


def published(git_dir, which):
    """The classes of a revision, as a namespace."""
    source = subprocess.run(
        ["git", "--git-dir", git_dir, "show", f"{REFS[which]}:train_gpt.py"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    tree = ast.parse(source)
    parts = [ast.get_source_segment(source, n) for n in tree.body if getattr(n, "name", None) in CLASSES]
    text = "\n\n".join(
        (
            "@dataclass\n"
            if p.split("(")[0].split(":")[0] in ("class AttnArgs", "class ForwardScheduleConfig")
            else ""
        )
        + p
        for p in parts
    )
    for old, new in REPLACED:
        text = text.replace(old, new)
    space = dict(
        device="cpu",
        grad_scale=1.0,
        world_size=1,
        grad_accum_steps=8,
        F=torch.nn.functional,
        nn=torch.nn,
        torch=torch,
        os=os,
        Tensor=torch.Tensor,
        math=__import__("math"),
        dataclass=__import__("dataclasses").dataclass,
        triton=SimpleNamespace(cdiv=lambda a, b: -(-a // b)),
        dist=SimpleNamespace(get_world_size=lambda: 1),
        args=SimpleNamespace(
            bigram_vocab_size=BIGRAMS, bigram_dim=192, bigram_sign_table_rows=SIGNS, val_batch_size=8 * N
        ),
        flash_attn_interface=SimpleNamespace(flash_attn_varlen_func=attention),
        QKNormRoPEPad=norm_and_rotate,
        dc_attention_postonly_nodd_correction_add_base_triton=second_softmax,
        FusedSoftcappedCrossEntropy=Loss,
        ReLUSqrdMLP=Mlp.apply,
        FusedLinearReLUSquareFunction=Mlp,
    )
    exec(compile(text, which, "exec"), space)
    return space


def compare(git_dir, which):
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    space, narrow = published(git_dir, which), which == "90"
    theirs = space["GPT"](VOCAB, 11, 6, 32, 192, N)
    sizes = record.Sizes(
        model_dim=192,
        num_heads=6,
        mlp_dim=768,
        vocab_size=VOCAB,
        bigram_rows=BIGRAMS,
        sign_rows=SIGNS,
        qk_dim=16 if narrow else None,
    )
    r = record.Record(sizes, wo_by_input=narrow, schedule=record.Schedule(), masked=which == "mask")
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p += (
                0.1 * p.std() * torch.randn(p.shape)
                if p.numel() > 1 and p.std() > 0
                else 0.1 * torch.randn(p.shape)
            )
    p = {n: t.detach().clone() for n, t in theirs.named_parameters()}
    prefix = torch.randint(-1, VOCAB, (sizes.padded_vocab,))
    theirs.prefix_table.copy_(prefix)
    mask = torch.rand(sizes.padded_vocab, sizes.padded_vocab) < 0.1
    if r.masked:
        theirs.canon_mask.copy_(
            (mask.view(len(mask), -1, 8).int() << torch.arange(8)).sum(-1).to(torch.uint8)
        )
    ours = model.Model(r, p, theirs.bigram_sign_table.double(), prefix, mask=mask)
    rope = model.Rope.start(sizes, torch.float64)
    rope.follow(OLD_LONG, WINDOWS[1])
    for yarn in (theirs.yarn, theirs.yarn_paired_head):
        yarn.apply(OLD_LONG, WINDOWS[1])
    batch = data.make_batch(torch.randint(0, VOCAB, (N + 1,)), torch.tensor([0, 50, 51, N]), sizes)
    weights, prefix_weight = (1.0, 0.5, 0.25), 0.25

    def theirs_loss(training):
        theirs.train(training)
        schedule = space["ForwardScheduleConfig"](
            torch.tensor(weights), torch.tensor(prefix_weight), *WINDOWS, N
        )
        return theirs(batch.inputs, batch.targets, batch.cu_seqlens, batch.bigram_rows, schedule).sum()

    a, b = theirs_loss(True), ours.loss(batch, WINDOWS, rope, weights, prefix_weight)
    a.backward()
    b.backward()
    errors = {
        n: float((q.grad - ours.p[n].grad).norm() / q.grad.norm().clamp(min=1e-300))
        for n, q in theirs.named_parameters()
    }
    worst = max(errors, key=errors.get)
    with torch.no_grad():
        validation = abs(float(theirs_loss(False) / ours.validation_loss(batch, WINDOWS, rope, r.masked)) - 1)
        training = abs(float(a / b) - 1)
    lines = [
        (training < 1e-12, f"training loss of {which}: {training:.1e}"),
        (validation < 1e-12, f"validation loss of {which}: {validation:.1e}"),
        (
            errors[worst] < 1e-10 and len(errors) == len(ours.p),
            f"gradients of all {len(errors)} tensors of {which}: worst {errors[worst]:.1e}, {worst}",
        ),
    ]
    return lines


if __name__ == "__main__":
    os.environ |= {"DISABLE_FP8": "1", "QK_HEAD_DIM": "16"}
    results = [line for which in sys.argv[2:] or REFS for line in compare(sys.argv[1], which)]
    for i, (ok, what) in enumerate(results, 1):
        print(f"{'ok' if ok else 'not ok'} {i} - {what}")
    print(f"1..{len(results)}")
    sys.exit(not all(ok for ok, _ in results))
