"""Which tokens cannot follow a token in text that a byte-pair tokenizer wrote: its merges would have joined
across the seam.

Ids of tokens of two and more bytes are the ranks of the merges that make them.
"""

import unicodedata

import numpy as np

CONTRACTIONS = (
    b"'s",
    b"'t",
    b"'re",
    b"'ve",
    b"'m",
    b"'ll",
    b"'d",
)  # the tokenizer cuts behind them whatever follows
END = 1 << 30


def merges(token, ids):
    """[(rank, pieces after it)] of the token's own merges, the lowest rank first, leftmost on ties."""
    pieces, history = [token[i : i + 1] for i in range(len(token))], []
    while len(pieces) > 1:
        rank, at = min((ids.get(a + b, END), i) for i, (a, b) in enumerate(zip(pieces, pieces[1:])))
        if rank == END:
            raise ValueError(f"token {token!r} is not made by merges")
        pieces = pieces[:at] + [pieces[at] + pieces[at + 1]] + pieces[at + 2 :]
        history.append((rank, pieces))
    return history


def intervals(start, changes):
    """[(piece, first rank, rank after the last)] of a piece at an edge of a token, empty intervals left out."""
    entries = [(0, start)]
    for rank, piece in changes:
        if piece != entries[-1][1]:
            entries.append((rank, piece))
    ends = [rank for rank, _ in entries[1:]] + [END]
    return [(piece, begin, end) for (begin, piece), end in zip(entries, ends) if begin < end]


def character_class(text):
    """S white space, N number, L letter, O other, ? inside a character; text: candidates of 1 to 4 bytes."""
    for piece in text:
        try:
            c = piece.decode("utf-8")
        except UnicodeDecodeError:
            continue
        category = unicodedata.category(c)[0]
        return "S" if c.isspace() else category if category in "NL" else "O"
    return "?"


def impossible(token_bytes, padded_vocab):
    """Bits [padded_vocab, padded_vocab / 8]: bit x mod 8 of byte x / 8 of row p. token_bytes: {id: bytes} of
    all tokens with bytes.
    """
    ids = {b: i for i, b in token_bytes.items()}
    first, last, rules = {}, {}, []
    for v, b in token_bytes.items():
        history = merges(b, ids)
        if history:
            before = history[-2][1] if len(history) > 1 else [b[:1], b[1:]]
            rules.append((v, ids[before[0]], ids[before[1]]))
        for piece, *rest in intervals(b[:1], [(rank + 1, pieces[0]) for rank, pieces in history]):
            first.setdefault(ids[piece], []).append((v, *rest))
        for piece, *rest in intervals(b[-1:], [(rank, pieces[-1]) for rank, pieces in history]):
            last.setdefault(ids[piece], []).append((v, *rest))
    first, last = ({k: np.array(v) for k, v in edges.items()} for edges in (first, last))
    begins, ends = np.full(padded_vocab, "?"), np.full(padded_vocab, "?")
    for v, b in token_bytes.items():
        begins[v] = character_class(b[:n] for n in range(1, min(4, len(b)) + 1))
        ends[v] = character_class(b[-n:] for n in range(1, min(4, len(b)) + 1))
    free = np.array([ids[b] for b in CONTRACTIONS if b in ids], dtype=int)
    bits = np.zeros((padded_vocab, padded_vocab // 8), np.uint8)
    for v, a, b in rules:
        p, x = (e[(e[:, 1] <= v) & (v < e[:, 2]), 0] for e in (last[a], first[b]))
        p, x = p[~np.isin(p, free)], x[begins[x] != "?"]
        for rows, columns in (
            (p[ends[p] == "S"], x[begins[x] != "S"]),
            (p[ends[p] == "O"], x[begins[x] != "L"]),
            (p[~np.isin(ends[p], ("S", "O"))], x),
        ):
            if len(rows) and len(columns):
                at, inverse = np.unique(columns // 8, return_inverse=True)
                value = np.zeros(len(at), np.uint8)
                np.bitwise_or.at(value, inverse, (1 << columns % 8).astype(np.uint8))
                bits[np.ix_(rows, at)] |= value
    return bits
