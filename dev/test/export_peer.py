"""Compares exported folders, in transformers, with what the programs compute from the same checkpoints.

export_peer.py FOLDER ...    in each: checkpoint (a link), bf16/ and fp32/ (exported by the two builds),
                             tokens.bin (int32), logits.bf16 and logits.fp32 (of dev/test/logits.c), and
                             sample.txt (of --sample at temperature 0) with sample_prompt.txt

A line for each comparison: ok or not ok, what, the figure and its limit. Distances are |a - b| / |b| of
logits without their mean over the vocabulary (softmax does not see that, and the softcap makes it large).
"""

import os
import sys

try:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError as e:
    print(f"the Python module {e.name} is missing")
    sys.exit(77)  # the customary status of a skipped test

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)

# A logit of 12 layers has some 200 roundings of 2^-24 behind it, which add up like a random walk, and layers
# in which sums cancel to about a tenth: 200^0.5 * 2^-24 * 10.
FP32_LIMIT = 1e-5


def say(good, what, figure, limit):
    print(f"{'ok' if good else 'not ok'} {what}: {figure:.2e}, limit {limit:.2e}")


def opened(folder, dtype=None):
    more = {"dtype": dtype} if dtype else {}
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **more).eval()


def read(path, dtype):
    return torch.frombuffer(bytearray(open(path, "rb").read()), dtype=dtype)


def centred(z):
    return z - z.mean(-1, keepdim=True)


def distance(a, b):
    return float((centred(a) - centred(b)).norm() / centred(b).norm())


def compare_logits(folder, name):
    """Returns the bf16 model, and the fp32 logits of its weights by token."""
    ids = read(f"{folder}/tokens.bin", torch.int32).long()
    ours, exact = (
        read(f"{folder}/logits.{kind}", torch.float32).view(len(ids), -1) for kind in ("bf16", "fp32")
    )
    half, wide, full = (
        opened(f"{folder}/bf16"),
        opened(f"{folder}/bf16", torch.float32),
        opened(f"{folder}/fp32"),
    )
    with torch.no_grad():
        z, z_wide, z_full = (m(ids[None]).logits[0] for m in (half, wide, full))
    ours, exact = ours[:, : z.shape[1]], exact[:, : z.shape[1]]
    apart = distance(exact, z_full)
    say(apart <= FP32_LIMIT, f"{name}, fp32: logits", apart, FP32_LIMIT)
    # What rounding to bf16 does to these weights and tokens, twice: two programs round at the same places,
    # and sum in another order, so that either has its own errors of this size. A fifth is for chance.
    rounding = distance(z, z_wide)
    limit = 2**0.5 * 1.2 * rounding
    apart = distance(ours, z)
    say(apart <= limit, f"{name}, bf16: logits", apart, limit)
    apart = distance(ours, z_wide)
    say(apart <= 1.2 * rounding, f"{name}, bf16 beside fp32 of the same weights", apart, 1.2 * rounding)
    return half, wide, float((centred(z) - centred(z_wide)).abs().max())


def compare_text(folder, name, half, wide, largest):
    """Greedy text is equal, or parts where the two likeliest tokens are nearer than rounding moves logits."""
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/bf16", trust_remote_code=True)
    prompt = open(f"{folder}/sample_prompt.txt", encoding="utf-8").read()
    sample = open(f"{folder}/sample.txt", "rb").read().decode("utf-8", "replace")
    text = sample[sample.index(prompt) :].rstrip("\n")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = half.generate(ids, max_new_tokens=40, do_sample=False)[0]
    mine = tokenizer.decode(out, skip_special_tokens=True)
    if text == mine.rstrip("\n"):
        print(f"ok {name}: the same text at temperature 0, {len(out) - ids.shape[1]} tokens")
        return
    same = next(i for i in range(len(out)) if not text.startswith(tokenizer.decode(out[1 : i + 1])))
    with torch.no_grad():
        top = wide(out[None, :same]).logits[0, -1].topk(2).values
    gap = float(top[0] - top[1])
    say(
        gap <= 2 * largest,
        f"{name}: the text parts at token {same}; the two likeliest differ by",
        gap,
        2 * largest,
    )


def main(folders):
    for folder in folders:
        name = os.path.basename(folder)
        compare_text(folder, name, *compare_logits(folder, name))


main(sys.argv[1:])
