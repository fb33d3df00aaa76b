#!/usr/bin/env python3
"""One training run beside the PyTorch twin's, from the same weights over the same tokens, and how far their losses are apart.

Both train a schedule of --steps steps at one window, so that the twin is compiled once; the twin's last weights are validated by the
trainer itself. What is complete in --out is not run again. Exit status 0 when the limits hold, 1 when they do not or a run failed.
"""
import argparse
import glob
import itertools
import json
import os
import re
import shutil
import subprocess
import sys

MEAN_LIMIT, LARGEST_LIMIT, VALIDATION_LIMIT = 0.01, 0.05, 0.005  # of the training losses after the first steps; of the last validation


class Failed(Exception):
    """A run that ended badly: shown as one line."""


def run(command, console):
    """Runs to the end with what it prints in the file; a complete one is left as it is, an unfinished one's folder is kept aside."""
    if os.path.exists(console):
        return
    if not shutil.which(command[0]):
        raise Failed(f'{command[0]} is missing: run make (./train_gpt needs nvcc and cuDNN), or give --trainer FILE')
    os.makedirs(os.path.dirname(console), exist_ok=True)
    folder = console.removesuffix('.txt')
    if os.path.isdir(folder):
        kept = next(n for n in itertools.count(1) if not os.path.exists(f'{folder}.unfinished-{n}'))
        os.rename(folder, f'{folder}.unfinished-{kept}')
    with open(console + '.unfinished', 'w') as out:
        status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode
    if status:
        raise Failed(f'{command[0]} ended with status {status}: see {console}.unfinished')
    os.rename(console + '.unfinished', console)


def validation_loss(console):
    found = re.findall(r'val_loss:([0-9.]+)', open(console).read())
    if not found:
        raise Failed(f'{console}: no validation in it')
    return float(found[-1])


def trainer_losses(folder):
    """Training loss of each step, the first is that of the initial weights."""
    logs = glob.glob(glob.escape(folder) + '/*/*.jsonl')
    if len(logs) != 1:
        raise Failed(f'{folder}: {len(logs)} logs of a run, one was expected')
    events = [json.loads(line) for line in open(logs[0])]
    return [e['loss'] for e in events if e['event'] == 'step'], [e['ms'] for e in events if e['event'] == 'step']


def twin_losses(path):
    return [float(line.split()[1]) for line in open(path) if line.split()[1] != '-']


def make_runs(a):
    twin = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'reference', 'train.py')
    common = ['--preset', a.preset, '--num-scheduled', str(a.steps), '--num-extension', '0', '--window-schedule', '3']
    data, validation = ['--train-files', a.train, '--repeat'], ['--val-files', a.val, '--window-extension', '3', '--window-final', '3']
    run([a.trainer, *common, *data, *validation, '--val-every', '0', '--save-init', a.out + '/init.safetensors', '--out', a.out + '/ours'],
        a.out + '/ours.txt')
    run([sys.executable, twin, *common, *data, '--val-every', '0', '--init-from', a.out + '/init.safetensors', '--save-end',
         a.out + '/twin.safetensors', '--log', a.out + '/twin.log', *a.twin_options.split()], a.out + '/twin.txt')
    run([a.trainer, *common, *validation, '--eval-only', '--init-from', a.out + '/twin.safetensors', '--out', a.out + '/twin_validated'],
        a.out + '/twin_validated.txt')


def compare(a):
    ours, ms = trainer_losses(a.out + '/ours')
    twin = twin_losses(a.out + '/twin.log')
    if len(ours) != a.steps or len(twin) != a.steps:
        raise Failed(f'{a.out}: {len(ours)} and {len(twin)} steps, {a.steps} were expected')
    apart = [x - y for x, y in zip(ours, twin)][a.skip:]
    mean, largest = sum(map(abs, apart)) / len(apart), max(map(abs, apart))
    ours_val, twin_val = validation_loss(a.out + '/ours.txt'), validation_loss(a.out + '/twin_validated.txt')
    print(f'training losses of steps {a.skip + 1} to {a.steps}: mean of absolute differences {mean:.4f} (limit {MEAN_LIMIT}), '
          f'largest {largest:.4f} (limit {LARGEST_LIMIT}), mean {sum(apart) / len(apart):+.4f}')
    print(f'last validation: {ours_val:.4f}, the twin {twin_val:.4f}: {ours_val - twin_val:+.4f} (limit {VALIDATION_LIMIT:+})')
    spent = re.search(r'median ([0-9.]+) ms', open(a.out + '/twin.txt').read())
    print(f'step: {sorted(ms)[len(ms) // 2]:.1f} ms, the twin {spent[1] if spent else "-"} ms, medians')
    return mean < MEAN_LIMIT and largest < LARGEST_LIMIT and ours_val - twin_val <= VALIDATION_LIMIT


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ('train', 'val'):
        p.add_argument('--' + name, required=True, help=f'glob of the {name} shards')
    p.add_argument('--out', required=True, help='folder of both runs')
    p.add_argument('--trainer', default='./train_gpt')
    p.add_argument('--preset', default='2025-10-27')
    p.add_argument('--steps', type=int, default=200)
    p.add_argument('--skip', type=int, default=20, help='first steps whose differences do not count')
    p.add_argument('--twin-options', default='--attention flash --compile')
    a = p.parse_args()
    try:
        make_runs(a)
        return 0 if compare(a) else 1
    except (Failed, OSError) as e:
        print(f'twin_parity: {e}', file=sys.stderr)
        return 1


if __name__ == '__main__':
    sys.exit(main())
