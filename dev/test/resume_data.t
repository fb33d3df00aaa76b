#!/usr/bin/env perl
# --resume and the training shards: moved or renamed files change nothing, other files are refused by name, files may come behind
# those of the first pass.
use strict;
use warnings;
use File::Copy qw(copy);
use File::Path qw(make_path);
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

plan skip_all => "$trainer is missing: run make" if !-x $trainer;
# About six steps each: 9 steps end in the second one, 20 steps in the fourth.
write_shard("train_$_.bin", documents(6000, 10 + $_)) for 1 .. 5;
write_shard('val.bin', documents(700, 2));
run_ok('20 steps at once', $trainer, @tiny, '--out', "$dir/whole");
run_ok('9 steps', $trainer, @tiny, '--out', "$dir/nine", '--stop-at', 9);
my ($whole, $nine) = (checkpoint("$dir/whole", 20), checkpoint("$dir/nine", 9));
my (undef, $metadata) = tensors($nine);
my @lines = split /\n/, $metadata->{'data.shards'};
is(scalar(grep { /^6000 [0-9a-f]{16} train_\d\.bin$/ } @lines), 5, 'a checkpoint lists its shards') or diag $metadata->{'data.shards'};

# folder($name, [file, source], ...): the shards of a case. Returns the options of a run with them.
sub folder {
    my ($name, @files) = @_;
    make_path("$dir/$name");
    for (@files) { my ($file, $source) = @$_; copy("$dir/$source", "$dir/$name/$file") or die "$source: $!" }
    return ($trainer, @tiny, '--train-files', "$dir/$name/*.bin", '--resume', $nine, '--out', "$dir/$name");
}
sub all_but { my ($other, @change) = @_; return ((map { ["train_$_.bin", "train_$_.bin"] } grep { $_ != $other } 1 .. 5), @change) }

run_ok('in another folder, under other names', folder('moved', map { ["part $_\xe4.bin", "train_$_.bin"] } 1 .. 5));
my $state = same_state($whole, checkpoint("$dir/moved", 20));
is($state, 'data.shards option.train-files', 'to the same bits, but for the names');
my (undef, $moved) = tensors(checkpoint("$dir/moved", 20));
like($moved->{'data.shards'}, qr/^6000 [0-9a-f]{16} part 1\?\.bin$/m, 'names keep to printable ASCII');

write_shard('other.bin', documents(6000, 99));
write_shard('long.bin', documents(6100, 12));
refuses('a shard of the same name and size with other tokens', 1,
    qr/step_000009\.safetensors: its run's training shard 2 was train_2\.bin with 6000 tokens; now it is train_2\.bin with 6000, others: give/,
    folder('contents', all_but(2, ['train_2.bin', 'other.bin'])));
refuses('a shard that has grown', 1, qr/shard 2 was train_2\.bin with 6000 tokens; now it is train_2\.bin with 6100: give/,
    folder('size', all_but(2, ['train_2.bin', 'long.bin'])));
refuses('one that is still to come', 1, qr/shard 5 was train_5\.bin/, folder('later', all_but(5, ['train_5.bin', 'other.bin'])));
refuses('another order', 1, qr/shard 1 was train_1\.bin with 6000 tokens; now it is a\.bin/, folder('order', all_but(2, ['a.bin', 'train_2.bin'])));
refuses('a shard that is missing', 1, qr/its run had a training shard 5, train_5\.bin with 6000 tokens, and there are only 4 now/,
    folder('missing', all_but(5)));
run_ok('a shard more behind the others', folder('more', all_but(0, ['train_6.bin', 'other.bin'])));
is(same_state($whole, checkpoint("$dir/more", 20)), 'data.shards option.train-files', 'goes on as without it');

# In the second pass over the files it would change what is behind.
my @twice = ($trainer, @tiny, '--train-files', "$dir/train_1.bin", '--epochs', 9);
run_ok('a second pass', @twice, '--out', "$dir/twice", '--stop-at', 9);
my @grown = folder('grown', ['train_1.bin', 'train_1.bin'], ['train_2.bin', 'train_2.bin']);
refuses('a shard more in the second pass', 1, qr/has begun its 1 training shard anew; there are 2 now, from train_2\.bin on/,
    @grown, '--epochs', 9, '--resume', "$dir/twice");

# Checkpoints made before the list was.
my $old = rewrite($nine, "$dir/old.safetensors", sub { delete $_[2]{'data.shards'}; 1 });
my ($status, $out, $err) = run($trainer, @tiny, '--resume', $old, '--out', "$dir/old");
ok($status eq '0' && $err =~ /\A[^\n]*note: the checkpoint does not say which training shards its run had[^\n]*\n\z/, 'without a list: a note') or diag $err;
is(same_state($whole, checkpoint("$dir/old", 20)), '', 'and the same bits');
for my $damage ('6000', "6000 12 \n", 'x', '6000 12') {
    my $file = rewrite($nine, "$dir/damaged.safetensors", sub { $_[2]{'data.shards'} = $damage; 1 });
    refuses('a damaged list', 1, qr/its list of training shards is damaged/, $trainer, @tiny, '--resume', $file, '--out', "$dir/bad");
}
my $none = rewrite($nine, "$dir/none.safetensors", sub { $_[2]{'data.shards'} = ''; 1 });
refuses('an empty list', 1, qr/its list of training shards is damaged/, $trainer, @tiny, '--resume', $none, '--out', "$dir/bad");
run_ok('weights alone need no shards of that run', $trainer, @tiny, '--train-files', "$dir/other.bin", '--val-files', "$dir/val.bin",
    '--resume', $nine, '--eval-only');
done_testing;
