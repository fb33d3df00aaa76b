#!/usr/bin/env perl
# The page of current figures: made from the CSV files in dev/bench and up to date; what the shell benches
# append to such files.
use strict;
use warnings;
use Cwd qw(abs_path);
use File::Basename qw(dirname);
use File::Path qw(make_path);
use File::Temp qw(tempdir);
use FindBin;
use lib $FindBin::Bin;
use TrainTest qw(spew slurp start finish);
use Test::More;

my $root = dirname(dirname(dirname(abs_path(__FILE__))));
my $dir = tempdir(CLEANUP => 1);
my $HEAD = "date,commit,machine,op,shape,value,unit,command\n";

sub figures { return finish(start("$root/dev/bench/figures", @_), 60) }
sub rows { my (undef, @rows) = split /\n/, slurp($_[0]); return @rows }

my ($status, $out, $err) = figures('--check');
is($status, '0', 'dev/bench/FIGURES.md is up to date') or diag $err;
require "$root/dev/bench/figures";
my @files = glob "$root/dev/bench/*.csv";
cmp_ok(scalar @files, '>=', 10, 'CSV files');
for my $path (@files) {
    my @rows = eval { Figures::read_rows($path) };
    ok(@rows > 0, $path =~ s{.*/}{}r . ': ' . @rows . ' rows') or diag $@;
    my %commit = map { $_->{commit} => 1 } @rows;
    is(join(' ', grep { !/\A(?:[0-9a-f]{7}\+?|-|unknown)\z/ } sort keys %commit), '', 'commits');
}

# ---- the page ----------------------------------------------------------------------------------------------

make_path("$dir/a'b");
spew(
    "$dir/a'b/mine.csv",
    $HEAD . join '',
    map {"$_\n"} '2026-01-01,aaaaaaa,1 x G,step,"w 3, ""x""",10.0,ms,./a | b',
    '2026-01-02,bbbbbbb,1 x G,step,"w 3, ""x""",9.50,ms,./a',
    '2026-01-01,ccccccc,2 x G,step,"w 3, ""x""",7,ms,./a',
    '2026-01-01,-,1 x G,loss,"run, step 5",3.5,nats,./c',
    '2026-01-01,-,1 x G,loss,"run, step 10",3.2500,nats,./c');
spew("$dir/a'b/curve.csv",
    $HEAD
        . "2026-01-01,-,1 x G,loss,\"run, step 5\",3.5,nats,./c\n"
        . "2026-01-01,-,1 x G,loss,\"run, step 10\",3.2500,nats,./c\n"
);
($status, $out, $err) = figures('--check', "$dir/a'b");
ok( $status eq '1'
        && $err =~ /\Afigures: error: \S+FIGURES\.md is not up to date: run dev\/bench\/figures\n\z/,
    'a page that is missing is not up to date') or diag $err;
is((figures("$dir/a'b"))[0], '0', 'it is made');
is((figures('--check', "$dir/a'b"))[0], '0', 'and up to date then');
my $page = slurp("$dir/a'b/FIGURES.md");
like(
    $page,
    qr/^\| step \| w 3, "x" \| 9\.50 ms \| 1 x G \| 2026-01-02 \| bbbbbbb \| `\.\/a` \|$/m,
    'the newest row, its digits as they are');
unlike($page, qr/10\.0 ms/, 'the older one is left out');
like($page, qr/\| 7 ms \| 2 x G /, 'another machine is another figure');
like(
    $page,
    qr/^\| loss \| run \| 5: 3\.5, 10: 3\.2500 nats \| 1 x G \| 2026-01-01 \| not noted \|/m,
    'the steps of a curve are one row');
spew("$dir/a'b/mine.csv",
    slurp("$dir/a'b/mine.csv") . "2026-01-03,ddddddd,1 x G,step,\"w 3, \"\"x\"\"\",9,ms,./a\n");
is((figures('--check', "$dir/a'b"))[0], '1', 'a new row makes it old');

for (
    ['a short row', qr/line 2: 3 fields, not 8/, $HEAD . "a,b,c\n"],
    ['a quote that does not end', qr/line 2: 0 fields/, $HEAD . "\"a,b,c,d,e,f,g,h\n"],
    ['no number', qr/"fast" is no number/, $HEAD . "2026-01-01,x,m,o,s,fast,ms,c\n"],
    ['no date', qr/"today" is no date/, $HEAD . "today,x,m,o,s,1,ms,c\n"],
    ['no command', qr/line 2: no command/, $HEAD . "2026-01-01,x,m,o,s,1,ms,\n"],
    ['another head', qr/line 1: not "date,/, "a,b\n"],)
{
    my ($what, $pattern, $text) = @$_;
    make_path("$dir/bad");
    spew("$dir/bad/bad.csv", $text);
    ($status, $out, $err) = figures("$dir/bad");
    ok( $status eq '1'
            && $err =~ /\Afigures: error: [^\n]*\n\z/
            && $err =~ $pattern
            && !-e "$dir/bad/FIGURES.md",
        "refused: $what") or diag "$status $err";
}

# ---- what the shell benches append -------------------------------------------------------------------------

spew("$dir/bench.sh",
"set -eu\nsource $root/dev/bench/figures.sh\n"
        . "figure 'a, b' \"say \\\"x\\\"\" \$'two\\nlines' 1.5 ms\necho \"\$#:\$*\"\n"
);
($status, $out, $err) =
    finish(start('bash', "$dir/bench.sh", 'one', '--csv', "$dir/own figures.csv", 'two words'), 20);
is("$status $out$err", "0 2:one two words\n", 'a script gets its other arguments');
my ($row) = rows("$dir/own figures.csv");
like($row // '',
    qr{\A\d{4}-\d\d-\d\d,[^,]+,"a, b","say ""x""",two lines,1\.5,ms,dev/bench/bench\.sh one two words\z},
    'its row');
is(scalar(my @parsed = Figures::read_rows("$dir/own figures.csv")), 1, 'which the page can read');
($status, $out, $err) = finish(start('bash', "$dir/bench.sh", '--csv'), 20);
ok($status eq '2' && $err eq "bench.sh: --csv needs the name of a file\n", '--csv without a name');
is((finish(start('bash', "$dir/bench.sh"), 20))[0], '0', 'without --csv nothing is written');

# scaling.sh with stand-ins for two GPUs and for the trainer: 100 ms a step on one, 60 on two.
make_path("$dir/bin");
spew("$dir/bin/nvidia-smi",
"#!/bin/sh\ncase \$1 in -L) echo 'GPU 0: X'; echo 'GPU 1: X';; *) echo 'NVIDIA X'; echo 'NVIDIA X';; esac\n"
);
spew("$dir/bin/trainer", <<'END');
#!/usr/bin/env perl
my %o; $o{$ARGV[$_]} = $ARGV[$_ + 1] for 0 .. $#ARGV;
system 'mkdir', '-p', "$o{'--out'}/run";
open my $log, '>', "$o{'--out'}/run/log.txt" or die;
my $ms = $o{'--gpus'} eq '2' ? 60 : 100;
printf $log "step:%d/12 train_time:%dms step_avg:%.2fms\n", $_, $_ * $ms, $ms for 1 .. 12;
END
chmod 0755, "$dir/bin/nvidia-smi", "$dir/bin/trainer";
{
    local @ENV{qw(PATH TRAINER STEPS)} = ("$dir/bin:$ENV{PATH}", "$dir/bin/trainer", 8);
    ($status, $out, $err) =
        finish(start("$root/dev/bench/scaling.sh", '--csv', "$dir/scaling.csv", 'train files', 'val'), 60);
}
is($status, '0', 'scaling.sh') or diag "$out$err";
my @scaling = eval { Figures::read_rows("$dir/scaling.csv") };
is_deeply(
    [map {"$_->{machine}: $_->{op} $_->{value} $_->{unit}"} @scaling],
    [   '1 x NVIDIA X: step 100.00 ms',
        '2 x NVIDIA X: step 60.00 ms',
        '2 x NVIDIA X: speed-up over one GPU 1.67 times'],
    'its rows') or diag $@;
is($scaling[0]{command} // '', 'dev/bench/scaling.sh train files val', 'its command');
done_testing;
