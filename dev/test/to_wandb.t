#!/usr/bin/env perl
# scripts/to_wandb: what it refuses, and, where the Python package wandb is installed (PYTHON: the interpreter that
# has it), offline runs of W&B that hold what the JSON lines say.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use JSON::PP ();
use Test::More;

my $python = $ENV{PYTHON} // 'python3';
plan skip_all => "$python is not here" if system "'$python' -c '' >/dev/null 2>&1";
my @command = ($python, "$root/scripts/to_wandb");
chdir $dir or die;

mkdir 'run';
my $uuid = '01234567-89ab-4def-8123-456789abcdef';
my @lines = (
    qq({"event":"options","run":"$uuid","options":{"seed":7,"repeat":true,"ns":"polar\\u001b"}}),
    '{"event":"validation","step":0,"val_loss":9}', '{"event":"message","text":"x"}',
    '{"event":"step","step":1,"loss":8.5,"lr":0.03,"momentum":0.85,"ms":100,"mfu":0.4,"tokens":64,"train_ms":100}',
    '{"event":"step","step":2,"loss":null,"lr":0.03,"ms":1e999}', '{"event":"failure","text":"diverged"}',
    '{"event":"step","ste');
spew("run/$uuid.jsonl", join "\n", @lines);
utime time - 9, time - 9, "run/$uuid.jsonl";
spew('run/11234567-89ab-4def-8123-456789abcdef.jsonl',
    qq({"event":"options","run":"x","resumed":"from step 1, y","options":{"seed":8}}\n{"event":"step","step":2,"loss":8}\n));
my $hostile = "a\n\e[31m`x`<b>" . 'y' x 150;
spew("$hostile.jsonl", join('', map {"$_\n"} @lines[0 .. 5]));
spew('broken.jsonl', "{\n");
spew('empty.jsonl', qq({"event":"end"}\n));

SKIP: {
    my $wandb = !system "'$python' -c 'import wandb' >/dev/null 2>&1";
    if (!$wandb) {
        refuses('without wandb', 1, qr/\Ato_wandb: error: the Python package wandb is not here: pip install wandb$/, @command, 'run');
        skip 'wandb is not here: PYTHON=... names an interpreter that has it', 1;
    }
    refuses(@$_) for
        ['a run that is not there', 1, qr/error: no\\nrun: no such file or folder/, @command, "no\nrun"],
        ['a broken line', 1, qr/error: broken\.jsonl: line 1: not JSON/, @command, 'run', 'broken.jsonl'],
        ['no step', 1, qr/error: empty\.jsonl: no step in it/, @command, 'empty.jsonl'];
    ok(!-e 'wandb-offline', 'and nothing is written');
    my ($out) = run_ok('two runs', @command, '--project', 'p', '--out', 'here', 'run', "$hostile.jsonl");
    my @written = split /\n/, $out;
    is(scalar(grep {-d} @written), 2, 'are two offline runs');
    spew('read.py', <<'PYTHON');
import glob, json, sys
from wandb.proto import wandb_internal_pb2

def records(data):
    # A log of LevelDB: blocks of 32 KiB, pieces of records behind 4 bytes of a sum, 2 of length and a kind.
    at, whole = 7, b""
    while at < len(data):
        if at % 32768 > 32768 - 7:
            at += 32768 - at % 32768
        length, kind = int.from_bytes(data[at + 4:at + 6], "little"), data[at + 6]
        whole += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, the last piece of one
            yield whole
            whole = b""

read = {"steps": {}, "config": {}}
for data in records(open(glob.glob(sys.argv[1] + "/*.wandb")[0], "rb").read()):
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    if record.HasField("run"):
        read["run"] = [record.run.run_id, record.run.display_name, record.run.project, record.run.notes]
        for item in record.run.config.update:
            read["config"][item.key or item.nested_key[0]] = json.loads(item.value_json)
    if record.HasField("history"):
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        read["steps"][row["_step"]] = {name: value for name, value in row.items() if name[0] != "_"}
    if record.HasField("exit"):
        read["exit"] = record.exit.exit_code
print(json.dumps(read))
PYTHON
    my @read = map { my ($text) = run_ok("$_ is read", $python, 'read.py', $_); JSON::PP::decode_json($text) } @written;
    is_deeply($read[0]{run}, [$uuid, 'run', 'p', ''], 'id, name of the folder, project');
    is_deeply($read[0]{steps}, {
            0 => {'validation/loss' => 9},
            1 => {'train/loss' => 8.5, 'schedule/learning_rate' => 0.03, 'schedule/momentum' => 0.85, 'speed/step_ms' => 100,
                'speed/mfu' => 0.4, train_ms => 100},
            2 => {'train/loss' => 8}},
        'all numbers, those of step 2 from the process that took it last');
    is($read[0]{config}{seed}, 8, 'its options');
    is_deeply([@{$read[1]{run}}[0, 3], $read[1]{exit}, $read[1]{steps}{2}], [$uuid, 'diverged', 1, {'schedule/learning_rate' => 0.03}],
        'a run that diverged, without what is no number');
    like($read[1]{run}[1], qr/\Aa\\n\\x1b\[31m`x`<b>y{111}\z/, 'its name is a line of 128 characters');
}
done_testing;
