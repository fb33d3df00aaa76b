"""Newton-Schulz orthogonalisation: six variants, batched over the leading dimension.

Every routine takes [k, n, m] with n <= m and iterates in `dtype`. Half types are emulated the way tensor cores work: operands
are half, sums are fp32, and each product with its added terms is rounded once, when stored.
"""
import torch

KJ = ((3.4445, -4.7750, 2.0315),) * 5
YOU = ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
       (2.8366, -3.0525, 1.2012))
POLAR_EXPRESS = ((8.156554524902461, -22.48329292557795, 15.878769915207462),
                 (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                 (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                 (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                 (2.3465413258596377, -1.7097828382687081, 0.42323551169305323))
# tuples, safety factor on the Frobenius norm (None: AOL row scaling instead), epsilon, Gram form, restart positions
VARIANTS = {
    "kj": (KJ, 1.0, 1e-7, False, ()),
    "you": (YOU, 1.0, 1e-7, False, ()),
    "polar": (POLAR_EXPRESS, 1.02, 1e-6, False, ()),
    "gram": (POLAR_EXPRESS, 1.02, 1e-6, True, (2,)),
    "turbo": (POLAR_EXPRESS[1:], None, 0.0, False, ()),
    "turbo-gram": (POLAR_EXPRESS[1:], None, 0.0, True, ()),
}
AOL_MARGIN = 1.02


def _is_half(dtype):
    return dtype in (torch.bfloat16, torch.float16)


def fma(product, alpha, a, b, addend=None, beta=0.0):
    """Rounded once: alpha * a b + beta * addend (product: torch.bmm), in the dtype of a."""
    if a.is_cuda and _is_half(a.dtype):
        return torch.baddbmm(addend, a, b, beta=beta, alpha=alpha) if addend is not None else (alpha * product(a, b)).to(a.dtype)
    wide = torch.float32 if _is_half(a.dtype) else a.dtype
    y = alpha * product(a.to(wide), b.to(wide))
    if addend is not None:
        y = y + beta * addend.to(wide)
    return y.to(a.dtype)


def mul(a, b, alpha=1.0, addend=None, beta=0.0):
    return fma(torch.bmm, alpha, a, b, addend, beta)


def gram_matrix(x):
    """x x^T, not rounded: the accumulators of the product."""
    wide = torch.float32 if _is_half(x.dtype) else x.dtype
    return torch.bmm(x.to(wide), x.to(wide).mT)


def frobenius(x):
    return x.square().sum(dim=(-2, -1), keepdim=True).sqrt()


def frobenius_prologue(g, kappa, eps, dtype):
    return (g / (kappa * frobenius(g) + eps)).to(dtype)


def aol_prologue(g, dtype):
    """Power-of-two normalisation (exact), then the row scale s and the scaled Gram matrix: returns x, s, s x x^T s.

    Zero rows get s = 0: they stay zero, and nothing is divided by zero.
    """
    norm = frobenius(g)
    half_rows = 0.5 * g.shape[-2] ** 0.5                      # the norm of n rows of length 0.5
    exponent = torch.log2(half_rows / norm.clamp_min(1e-38)).round()
    x = torch.ldexp(g, torch.where(norm > 0, exponent, torch.zeros_like(exponent)).to(torch.int32)).to(dtype)
    a = gram_matrix(x)
    rowsum = a.abs().sum(-1, keepdim=True)
    s = torch.where(rowsum > 0, (AOL_MARGIN * rowsum).rsqrt(), torch.zeros_like(rowsum))
    return x, s, (s * a * s.mT).to(dtype)


def standard(x, tuples, a=None):
    """Quintic steps; `a` is the Gram matrix of the first one when it is known already."""
    for ca, cb, cc in tuples:
        a = gram_matrix(x).to(x.dtype) if a is None else a
        b = mul(a, a, cc, a, cb)
        x = mul(b, x, 1.0, x, ca)
        a = None
    return x


def gram_loop(r, tuples, restarts, x):
    """Iterates on the n x n matrices r = x x^T and q; returns the last q, and x as the restarts left it."""
    eye = torch.eye(r.shape[-1], dtype=torch.float32 if _is_half(r.dtype) else r.dtype, device=r.device)
    q = None
    for i, (ca, cb, cc) in enumerate(tuples):
        if i > 0 and i in restarts:
            x = mul(q, x)
            r = gram_matrix(x).to(x.dtype)
            q = None
        z = mul(r, r, cc, r, cb)
        q = (z + ca * eye).to(r.dtype) if q is None else mul(q, z, 1.0, q, ca)
        if i + 1 < len(tuples) and i + 1 not in restarts:
            rz = mul(r, z, 1.0, r, ca)
            r = mul(z, rz, 1.0, rz, ca)
    return q, x


def orthogonalize(g, name, half):
    """orth(g) for g [k, n, m] float; half: iterate in bf16 (Gram forms: fp16), otherwise in the dtype of g."""
    tuples, kappa, eps, use_gram, restarts = VARIANTS[name]
    if g.shape[-2] > g.shape[-1]:
        return orthogonalize(g.mT, name, half).mT
    dtype = (torch.float16 if use_gram else torch.bfloat16) if half else g.dtype
    use_gram = use_gram and g.shape[-2] != g.shape[-1]        # square: the Gram form only costs more
    if kappa is None:
        x, s, a = aol_prologue(g, dtype)
        if use_gram:
            q, x = gram_loop(a, tuples, restarts, x)
            out = mul((q.to(s.dtype) * s.mT).to(dtype), x)
        else:
            out = standard((s * x).to(dtype), tuples, a)
    else:
        x = frobenius_prologue(g, kappa, eps, dtype)
        if use_gram:
            q, x = gram_loop(gram_matrix(x).to(dtype), tuples, restarts, x)
            out = mul(q, x)
        else:
            out = standard(x, tuples)
    return out.to(g.dtype)
