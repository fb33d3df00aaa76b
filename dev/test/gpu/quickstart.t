#!/usr/bin/env perl
# scripts/quickstart.sh with the CUDA program: the loss falls, text is written. In a folder of its own, on the program's own source
# text, so that neither a network nor anyone's data is needed.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/..";
use TrainTest;
use Test::More;

mkdir "$dir/$_" for qw(q q/data q/text);
symlink "$root/$_", "$dir/q/$_" or die "$_: $!" for qw(scripts train_gpt tokenize order2);
symlink $_, "$dir/q/data/" . s{.*/}{}r or die "$_: $!" for glob "$root/data/quickstart_text.*";
my $number = 0;
spew(sprintf("%s/q/text/%03d.txt", $dir, $number++), slurp($_)) for glob("$root/llmc/*.[ch] $root/llmc/*/*.[ch]* $root/llmc/*/*/*.[ch]* $root/dev/test/*.[ch] $root/*.md");
$ENV{TEXT} = "$dir/q/text";
my ($out) = run_ok('quickstart', "$dir/q/scripts/quickstart.sh");
like($out, qr/^== training with \.\/train_gpt$/m, 'it takes the CUDA program');
like($out, qr/on the FP8 units|head in bf16/, 'which says on which path it runs');
my $val = val_losses("$dir/q/runs/quickstart");
my @steps = sort { $a <=> $b } keys %$val;
is("@steps[0, -1]", '0 320', 'validations from the first step to the last');
cmp_ok($val->{320}, '<', $val->{0} - 3, "the loss falls from $val->{0} to $val->{320}");
my ($sample) = $out =~ /^val_loss:[\d.]+\n+(.*?)\n+== result/ms;
# Own text has documents of 500 bytes at most, and the sample ends where the model ends one.
cmp_ok(length($sample // ''), '>', 50, 'and there is a sample: ' . substr(($sample // '') =~ s/\s+/ /gr, 0, 100));
like($out, qr/order-2 byte model [\d.]+ bits per byte, this model [\d.]+ bits per byte: below it/, 'better than order-2 statistics');
done_testing;
