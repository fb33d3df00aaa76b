#!/usr/bin/env perl
# --describe says what is in a file of weights. scripts/export and scripts/import_torch: a model of every network, trained for
# some steps, is opened by transformers and gives our logits and our text; weights go through torch.save and back.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use JSON::PP ();
use TrainTest;
use Test::More;

my $python = $ENV{PYTHON} // 'python3';
my $modules = 'import torch, safetensors, transformers';
my ($export, $import) = ("$root/scripts/export", "$root/scripts/import_torch");
my ($logits, $exact_logits) = map { "$_/logits" } $trainer =~ /cpu/ ? "$root/" . ($ENV{BUILD} // 'build/cpu') : '', $exact =~ s{/[^/]*$}{}r;
plan skip_all => "$trainer is missing: run make" if !-x $trainer;
write_shard('train_1.bin', documents(24000, 1));
write_shard('val.bin', documents(1200, 2));

# ---- --describe -----------------------------------------------------------------------------------------------

# The parameters of a file lie in it where the description says, side by side, and all of the file is described.
for my $preset (qw(toy toy-2026)) {
    my $file = "$dir/$preset.safetensors";
    run_ok("$preset: weights", $trainer, '--preset', $preset, qw(--stop-at 1 --micro-batches 2 --val-tokens 128 --val-every 0 --repeat),
        '--save-init', $file, '--out', "$dir/init", '--train-files', "$dir/train_*.bin", '--val-files', "$dir/val.bin");
    my ($line) = run_ok('described', $trainer, '--preset', $preset, '--describe', '--init-from', $file);
    my $network = eval { JSON::PP::decode_json($line) } // {};
    is($network->{weights}, $file, 'as JSON, of that file');
    my ($tensors) = tensors($file);
    my (%matrices, @wrong);
    for my $p (@{$network->{parameters}}) {
        my $tensor = $tensors->{$p->{tensor}};
        push @wrong, $p->{tensor} if !$tensor || "@{$tensor->{shape}}" ne "@{$p->{shape}}";
        push @wrong, "$p->{tensor}: twice" if grep { $matrices{$p->{tensor}}{$_}++ } $p->{first} .. $p->{first} + $p->{matrices} - 1;
        $matrices{$p->{tensor}}{size} = $p->{rows} * $p->{cols};
    }
    for my $name (sort keys %$tensors) {
        my $values = 1;
        $values *= $_ for @{$tensors->{$name}{shape}};
        my $known = $matrices{$name} // {size => 0};
        my $share = $known->{size} * (keys(%$known) - 1) / $values;
        push @wrong, "$name: $share of it" if $name eq 'mlp_bank' ? $share < 0.8 : $share != 1; # whose last matrices nobody reads
    }
    is("@wrong", '', 'every tensor, all of its matrices, once');
}
refuses('--describe without weights', 2, qr/need weights/, $trainer, '--describe');

# ---- every network in transformers ----------------------------------------------------------------------------

my ($missing) = run($python, '-c', $modules);
if ($missing ne '0') {
    diag "torch, safetensors or transformers is missing for $python (PYTHON names another): exports are not tested";
    done_testing;
    exit;
}
@ENV{qw(HF_HOME HF_HUB_OFFLINE)} = ("$dir/cache", 1);

# Widths that every network takes, windows and DC's keys that are shorter than the sequence; toys have their own.
my ($help) = (run($trainer, '--help'))[1];
my @presets = ($help =~ /^Presets,.*?\n(.*?)\n\n/ms)[0] =~ /^  (\S+) +(?:the defaults|.*with its own network)/mg;
cmp_ok(scalar @presets, '>=', 8, "presets with a network of their own: @presets");
my @small = (qw(--model-dim 96 --num-heads 6 --mlp-dim 128 --block-size 4 --micro-batch-tokens 144 --max-document 144
    --stage-tokens), '', '--stage-documents', '', qw(--head bf16 --mlp bf16 --num-scheduled 30 --num-extension 4));
my $prompt = 'abcd';
my @ids = (256, map { ord } split //, substr('abcdefghabcdabcdefghgfedhhabcdefg' x 4, 0, 129));

sub model {
    my ($preset) = @_;
    my $toy = $preset =~ /toy/;
    my $folder = "$dir/$preset";
    my @tokens = @ids[0 .. ($toy ? 49 : 129)];
    mkdir $folder or die;
    run_ok("$preset: trained", $trainer, '--preset', $preset, $toy ? () : @small, qw(--micro-batches 2 --val-every 0 --repeat),
        '--val-tokens', $toy ? 128 : 288, '--out', "$folder/run", '--train-files', "$dir/train_*.bin", '--val-files', "$dir/val.bin");
    my $checkpoint = newest("$folder/run");
    for (['bf16', $trainer, $logits], ['fp32', $exact, $exact_logits]) {
        my ($kind, $program, $tool) = @$_;
        run_ok("$preset: exported, $kind", $python, $export, $checkpoint, "$folder/$kind", '--program', $program);
        spew("$folder/tokens.bin", pack 'l<*', @tokens);
        system("$tool --resume '$checkpoint' <'$folder/tokens.bin' >'$folder/logits.$kind' 2>'$folder/err'") == 0
            or diag slurp("$folder/err");
    }
    spew("$folder/sample_prompt.txt", $prompt);
    my ($sample) = run_ok("$preset: text", $trainer, '--resume', $checkpoint, '--sample', $prompt, qw(--num-tokens 40 --temperature 0));
    spew("$folder/sample.txt", $sample);
    return $folder;
}

my @folders = map { model($_) } @presets;
my ($status, $out, $err) = finish(start($python, "$root/dev/test/export_peer.py", @folders), 600);
is($status, 0, 'the comparison') or diag $err;
my @lines = split /\n/, $out;
is(scalar @lines, 4 * @presets, 'four comparisons a network');
ok(/^ok /, s/^(?:not )?ok //r) for @lines;

# ---- pictures of the networks ----------------------------------------------------------------------------------

for my $picture (glob "$root/dev/method/*.svg") {
    my ($preset) = $picture =~ m{([^/]+)\.svg$};
    my (undef, $drawn) = run($python, "$root/dev/method/draw", "$dir/$preset/bf16/config.json");
    is($drawn, slurp($picture), "dev/method/$preset.svg is the network of that preset");
}

# ---- torch.save and back --------------------------------------------------------------------------------------

my $checkpoint = newest("$folders[0]/run");
my $save = <<'END';
import sys, torch
from safetensors.torch import load_file
state = {"_orig_mod." + n: t for n, t in load_file(sys.argv[1]).items()}
state["_orig_mod.count"] = torch.tensor([3])
torch.save({"step": 4, "code": "x", "model": state, "optimizers": [{"state": {}}]}, sys.argv[2])
torch.save(state, sys.argv[3])
torch.save({"step": 4}, sys.argv[4])
END
spew("$dir/save.py", $save);
run_ok('a checkpoint as torch.save writes it', $python, "$dir/save.py", $checkpoint, map { "$dir/$_.pt" } 'whole', 'state', 'none');
for my $name ('whole', 'state') {
    run_ok("import_torch: $name", $python, $import, "$dir/$name.pt", "$dir/$name.safetensors");
    my ($ours) = tensors($checkpoint);
    my ($theirs) = tensors("$dir/$name.safetensors");
    is(join(' ', grep { !$theirs->{$_} || $theirs->{$_}{bytes} ne $ours->{$_}{bytes} } sort keys %$ours), '', 'every tensor came through');
    ok(!$theirs->{count}, 'and no whole numbers');
}
my @eval = ($trainer, '--preset', $presets[0], @small, qw(--micro-batches 2 --val-tokens 288 --eval-only), '--val-files', "$dir/val.bin");
my ($before) = run_ok('validation of the checkpoint', @eval, '--init-from', $checkpoint);
my ($after) = run_ok('of what was imported', @eval, '--init-from', "$dir/whole.safetensors");
is($after, $before, "the same loss: $after" =~ s/\n//r);
run_ok('export of weights alone', $python, $export, "$dir/whole.safetensors", "$dir/alone", '--program', $trainer,
    '--preset', $presets[0], @small, '--vocab-size', 257);
is(slurp("$dir/alone/model.safetensors"), slurp("$folders[0]/bf16/model.safetensors"), 'gives the same weights');

# ---- bad input ------------------------------------------------------------------------------------------------

spew("$dir/text.pt", 'no weights');
refuses('import_torch: no file', 1, qr/absent/, $python, $import, "$dir/absent.pt", "$dir/x.safetensors");
refuses('import_torch: no weights', 1, qr/text\.pt/, $python, $import, "$dir/text.pt", "$dir/x.safetensors");
refuses('import_torch: no model', 1, qr/holds no weights/, $python, $import, "$dir/none.pt", "$dir/x.safetensors");
refuses('import_torch: usage', 2, qr/usage/, $python, $import, "$dir/none.pt");
ok(!-e "$dir/x.safetensors", 'nothing was written');
refuses('export: a folder with something in it', 1, qr/not empty/, $python, $export, $checkpoint, $folders[0], '--program', $trainer);
refuses('export: no checkpoint', 1, qr/absent/, $python, $export, "$dir/absent", "$dir/y", '--program', $trainer);
refuses('export: no program', 1, qr/is missing: run make/, $python, $export, $checkpoint, "$dir/y", '--program', './absent');
refuses('export: weights of another network', 1, qr/tensor /, $python, $export, "$dir/whole.safetensors", "$dir/y", '--program', $trainer,
    qw(--preset toy --vocab-size 257));
refuses('export: no vocabulary there', 1, qr/vocab/, $python, $export, $checkpoint, "$dir/y", '--program', $trainer, '--vocab', "$dir/nothing");
ok(!-e "$dir/y", 'nothing was written');
done_testing;
