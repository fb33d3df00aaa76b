#!/usr/bin/env perl
# README: what it names exists, its commands have the options that it gives them, those that need neither GPU
# nor network are run in its order, its three numbers are those of the CSV file, and it stays short and in
# plain words.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

my $readme = slurp("$root/README.md");
my @lines = split /\n/, $readme;

cmp_ok(scalar @lines, '<=', 150, 'at most 150 lines');

# ---- words, links, numbers ---------------------------------------------------------------------------------

my $AVOID = join '|', 'scouts?', 'clerks?', 'desks?', 'copy unit', 'hub', 'wide tiles?', 'wide products?',
    'late squares?', 'last turns?', 'left over', 'products_begin', 'tell_part', 'hear_part';
for my $file ('README.md', 'dev/README.md', sort split /\n/, `cd '$root' && find llmc -type f`) {
    my @found = slurp("$root/$file") =~ /(?<!-)\b($AVOID)\b/gi;
    is("@found", '', "$file: none of the words to avoid");
}
while ($readme =~ /\]\((?!https?:)([^)#]+)\)/g) { ok(-e "$root/$1", "link: $1") }
unlike($readme, qr/\b[0-9a-f]{7}\b(?![0-9.])/, 'no commit ids');

require "$root/dev/bench/figures";
my %value = map { $_->{op} => "$_->{value} $_->{unit}" }
    Figures::current(Figures::read_rows("$root/dev/bench/beside_pytorch.csv"));
for my $what ('step', 'peak memory', 'start to first step') {
    my ($ours, $theirs) = map { $value{"$_: $what"} } 'train_gpt', 'PyTorch original';
    like($readme, qr/^- \*\*\Q$ours\E\*\*[^-]*PyTorch \Q$theirs\E/m, "first screen: $ours, PyTorch $theirs");
}
my ($picture) = $readme =~ /!\[[^\]]*\]\(([^)]+)\)/;
like(slurp("$root/$picture"), qr/\A\x89PNG/, "the picture $picture");
SKIP: {
    skip 'gnuplot is not installed', 1 if !grep { -x "$_/gnuplot" } split /:/, $ENV{PATH};
    my ($status, undef, $err) = run("$root/dev/bench/plot_beside_pytorch", "$dir/picture.png");
    ok($status eq '0' && slurp("$dir/picture.png") =~ /\A\x89PNG/, 'is made by dev/bench/plot_beside_pytorch')
        or diag $err;
}

# ---- commands ----------------------------------------------------------------------------------------------

# Indented lines that begin with a program, a script or make; comments cut off.
my @commands =
    map {s/\s+#.*//r}
    map { /^ {4}((?:[A-Z]+=\S+ )*(?:make|sbatch|(?:\.|data|scripts|dev)\/\S+\.?\S*)(?: .*)?)$/ ? $1 : () }
    grep { !/^ {4}\S+\/ {2}/ } @lines;
push @commands, grep {m{^(?:make|dev|scripts|data)[ /]}} $readme =~ /`([^`\n]+ [^`\n]+)`/g;
cmp_ok(scalar @commands, '>=', 18, 'commands: ' . @commands);

my %help; # of a program, scripts included
sub help {
    my ($program) = @_;
    $program = './train_gpt_cpu'
        if $program eq './train_gpt' || $program =~ /multi_node/; # which hand options on, of one table
    return $help{$program} //=
        do { my ($status, $out) = run("$root/$program", '--help'); $status eq '0' ? $out : '' };
}
my $makefile = slurp("$root/Makefile");
for my $command (@commands) {
    my @words = grep { !/^[A-Z_]+=/ } split ' ', $command;
    shift @words if $words[0] eq 'sbatch';
    my ($program) = grep { m{/} && !/^--/ } @words;
    if ($words[0] eq 'make') {
        my @goals = grep { !/=/ } split ' ', $command =~ s/"[^"]*"//gr =~ s/\S+=\S*//gr;
        ok(!(grep { $_ ne 'make' && $makefile !~ /^\Q$_\E:/m } @goals), $command);
        next;
    }
    ok(-x "$root/$program" || $program eq './train_gpt', "$program is there");
    my @missing = grep { help($program) !~ /^\s*(?:\S.*)?\Q$_\E\b/m }
        $command =~ s/^sbatch .*?\.slurm//r =~ /(--[a-z][-a-z]*)/g;
    is("@missing", '', "the options of: $command") or diag help($program);
}
# Options that stand in the text alone.
for my $option ($readme =~ /`(--[a-z][-a-z]*)[^`]*`/g) {
    next if $option eq '--help';
    my $known = grep { help($_) =~ /^\s*\Q$option\E\b/m } './train_gpt_cpu', './tokenize';
    ok($known, "$option is an option of train_gpt or tokenize");
}

# ---- those that can run here, in the order of the page -----------------------------------------------------

SKIP: {
    skip "$trainer is missing: run make", 1 if !-x $trainer || $trainer !~ /train_gpt_cpu/;
    mkdir "$dir/$_" for 'page', 'page/texts', 'page/data', 'page/records';
    chdir "$dir/page" or die;
    symlink "$root/$_", $_ for qw(train_gpt_cpu tokenize scripts dev Makefile);
    my $text = '';
    my @words = qw(the sea and a ship that sailed in morning light with every wind of spring she said or not);
    srand 1;
    for my $i (1 .. 400) {
        spew("texts/$i.txt", join(' ', map { $words[rand @words] } 1 .. 120) . ".\n");
    }
    spew('more.jsonl', join '', map {qq({"text":"$words[$_ % @words] $words[$_ * 7 % @words]"}\n)} 1 .. 50);
    my $short = '--stop-at 2 --val-tokens 8192 --val-every 0';
    my %more = ( # what makes a command short, and what it takes to be run here
        qr/^\.\/train_gpt_cpu --preset tiny/ => $short,
        qr/^\.\/train_gpt_cpu --resume runs$/ => '--stop-at 3 --val-tokens 8192',
        qr/--sample/ => '--num-tokens 3');
    for my $command (grep {/^\.\/(?:train_gpt_cpu|tokenize --vocab bytes)|^scripts\/plot_curve/} @commands) {
        my $full = $command;
        for my $pattern (sort keys %more) { $full .= " $more{$pattern}" if $command =~ $pattern }
        my ($status, $out, $err) = run('bash', '-c', $full);
        if ($command =~ /plot_curve/ && !grep { -x "$_/gnuplot" } split /:/, $ENV{PATH}) {
            is("$status $err", "1 plot_curve: error: gnuplot is not installed; scripts/install_deps.sh installs it\n",
                "says what is missing: $command");
            next;
        }
        ok($status eq '0', "runs: $command") or diag "$full\nstatus $status\n" . substr("$out$err", -1500);
    }
    my %logs; # of each run; the resumed one has two
    push @{$logs{(split '/')[1]}}, $_ for glob 'runs/*/*.jsonl';
    my @runs = sort keys %logs;
    is(scalar @runs, 2, 'a folder for each run, and the resumed one went on in its own');
    like(
        $runs[0] // '',
        qr/^\d{4}-\d\d-\d\d_tiny_[0-9a-f]{8}$/,
        'the folder of a run is named as the page says');
    ok((glob "runs/$runs[0]/*.txt") && (glob "runs/$runs[0]/step_000002.safetensors"),
        'and holds what it says')
        if @runs;
    rename "runs/$runs[$_]", 'runs/' . (qw(old1 new1))[$_] for 0, 1;
    for my $command (grep {/^scripts\/compare/} @commands) {
        my ($status, $out, $err) = run('bash', '-c', $command);
        ok($status eq '0' && -s 'page.html', "runs: $command") or diag "$out$err";
    }
    for my $seed (1, 2) { # two whole logs where scripts/speedrun_8xH100.sh puts them
        my $folder = "runs/speedrun_2026-08-06/$seed/2026-01-02_2025-10-27_0123456$seed";
        my $rule = '=' x 100;
        system 'mkdir', '-p', $folder;
        spew("$folder/$seed.txt",
                  "source\n$rule\ncommand line: ./train_gpt --seed $seed\n$rule\n"
                . "step:0/1 val_loss:10.8258 train_time:0ms step_avg:0.00ms\n"
                . "step:1/1 train_time:9ms step_avg:9.00ms\n"
                . "step:1/1 val_loss:3.2${seed}00 train_time:9ms step_avg:9.00ms\n"
                . "peak memory allocated: 1 MiB reserved: 2 MiB\n"
        );
    }
    for my $command (grep {/^scripts\/record/} @commands) {
        my ($status, $out, $err) = run('bash', '-c', "$command --records records");
        ok($status eq '0' && $out =~ /^Experiment, no record: /m, "runs: $command") or diag "$out$err";
    }
}
chdir '/';
done_testing;
