#!/usr/bin/env python3
"""Step time on R GPUs, computed from times measured on one GPU and from the speed of collectives.

A timeline of one step as llmc/dist/exchange.c queues it, for the model of the presets (12 layers, d 768, 32 matrix slots, 5 tables):
gathers at the start, each needed by a stage of the first forward; A = 8/R micro-batches; reduce-scatters as the stages of the
last backward end; then the optimizer on the own share. Collectives run one after the other on their stream and take
    time(S) = latency + S (R-1)/R / bus          all-reduce: twice that        (S bytes over all ranks)
Compute that runs beside a collective is slowed by the factor --slow. Printed: mean of a step with and one without Adam, what of
it is waiting for collectives ("exposed"), and the ratio to one GPU. It is a plan and no measurement.
"""
import argparse

LAYERS, SLOTS, MLP_SLOTS, TABLES = 12, 32, 22, 5
SLOT = 4 * 768 * 768                    # elements
TABLE = 50304 * 768
ATTENTION = [i for i in range(LAYERS - 1, 0, -1) if i != 7]
LAYER_OF_SLOT = [i for i in range(LAYERS - 1, 0, -1) for _ in range(2)] + ATTENTION
MLP, QKVO, ROWS = range(3)
TABLE_STAGE = [0, 9, 1, 2, LAYERS]      # embed, value_embeds.0 .1 .2 (their lowest layers), lm_head


def buckets(ranks, tables):
    """(stage, -kind, bytes of the gradient, bytes of the weight), in the order in which they are sent; kind: what waits for it."""
    found = []
    for first in range(0, SLOTS, ranks):
        layers = LAYER_OF_SLOT[first:first + ranks]
        found.append((min(layers), -(MLP if first < MLP_SLOTS else QKVO), 4 * ranks * SLOT, 2 * ranks * SLOT))
    if tables:
        found += [(stage, -ROWS, 4 * TABLE, 2 * TABLE) for stage in TABLE_STAGE]
    return sorted(found, reverse=True)


class Link:
    """The stream of the collectives: one at a time."""

    def __init__(self, a, ranks):
        self.a, self.ranks, self.free, self.busy = a, ranks, 0.0, 0.0

    def send(self, ready, size, times=1):
        part = (self.ranks - 1) / self.ranks
        took = times * (self.a.latency_us * 1e-3 + size * part / self.a.bus_gbs * 1e-6)
        self.free = max(self.free, ready) + took
        self.busy += took
        return self.free


def step_ms(a, ranks, adam):
    """(time of the step, waiting for collectives in it)."""
    layer = (a.micro_ms - a.head_ms - a.embed_ms) / (LAYERS - 1)
    forward, backward = layer / 3, layer * 2 / 3
    waited, now = 0.0, 0.0
    link = Link(a, ranks)

    def wait(until):
        nonlocal now, waited
        waited += max(0.0, until - now)
        now = max(now, until)

    # Gathers are for the step before: tables after an Adam step, that is in a step without Adam.
    arrived = {}
    if ranks > 1:
        for stage, _, _, size in reversed(buckets(ranks, not adam)):
            arrived[stage] = link.send(0.0, size)
    for stage in range(LAYERS + 1):
        wait(arrived.get(stage, 0.0))
        now += a.embed_ms / 3 if stage == 0 else forward if stage < LAYERS else a.head_ms
    if 8 // ranks > 1:                                  # the rest of this micro-batch, those between, the last one's forward
        now += (LAYERS - 1) * backward + a.embed_ms * 2 / 3
        now += (8 // ranks - 2) * a.micro_ms + a.embed_ms / 3 + (LAYERS - 1) * forward + a.head_ms
    arrived = {MLP: 0.0, QKVO: 0.0, ROWS: 0.0}
    sends = buckets(ranks, adam)
    for stage in range(LAYERS, -1, -1):
        now += a.embed_ms * 2 / 3 if stage == 0 else backward if stage < LAYERS else 0.0
        if ranks > 1:
            for at, kind, size, _ in sends:
                if at == stage:
                    arrived[-kind] = link.send(now, size)
    small = link.send(now, 4 * 1024, 2) if ranks > 1 else 0.0
    def slowest(first, last):                           # most slots of a rank among these
        return max(len([s for s in range(r, last, ranks) if s >= first]) for r in range(ranks))

    wait(arrived[MLP])
    now += slowest(0, MLP_SLOTS) * a.mlp_ms / MLP_SLOTS
    wait(arrived[QKVO])
    now += slowest(MLP_SLOTS, len(LAYER_OF_SLOT)) * a.attention_ms / len(ATTENTION)
    wait(small)
    now += a.fixed_ms + (a.adam_ms / ranks if adam else 0.0)
    return now + a.slow * link.busy, waited


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, text in (('micro-ms', 'forward and backward of one micro-batch'), ('head-ms', 'of it: head and loss'),
                       ('embed-ms', 'of it: embedding'), ('mlp-ms', 'NorMuon on the 22 MLP matrices'),
                       ('attention-ms', 'NorMuon on the 10 attention matrices'), ('adam-ms', 'Adam on the tables'),
                       ('fixed-ms', 'what every rank does alike, once a step'), ('latency-us', 'of a collective'),
                       ('bus-gbs', 'bus bandwidth of large reduce-scatters and all-gathers')):
        p.add_argument('--' + name, type=float, required=True, help=text)
    p.add_argument('--slow', type=float, default=0.0, help='share of a collective\'s time by which compute beside it is delayed')
    a = p.parse_args()
    one = None
    print('GPUs   step ms  exposed ms  speed-up  efficiency')
    for ranks in (1, 2, 4, 8):
        with_adam, without = step_ms(a, ranks, True), step_ms(a, ranks, False)
        step, exposed = ((x + y) / 2 for x, y in zip(with_adam, without))
        one = one or step
        print(f'{ranks:4d} {step:9.2f} {exposed:11.2f} {one / step:9.2f} {one / step / ranks:11.3f}')


if __name__ == '__main__':
    main()
