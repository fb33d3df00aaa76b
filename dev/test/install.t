#!/usr/bin/env perl
# make install, uninstall and dist: programs and tools run from where they are installed, the manual page and the completions have every
# option, nothing stays behind, and a release knows its commit without git.
use strict;
use warnings;
use FindBin;
use lib $FindBin::Bin;
use TrainTest;
use Test::More;

my $build = $ENV{BUILD} // 'build/cpu';
my $program = "$root/train_gpt_cpu";
plan skip_all => 'the programs are missing: run make test-programs' if !-x $program || !-x "$root/$build/manual";
delete @ENV{qw(MAKEFLAGS MFLAGS MAKELEVEL)}; # of a make that runs the tests
chdir $root or die;

# As it is built, without a look at what would have to be built anew.
sub make { my ($goal, @more) = @_; return run_ok("make $goal", 'make', '--no-print-directory', $goal, 'NVCC=', "CPU=$build", @more) }
sub files { my ($folder) = @_; return sort map { s{^\./}{}r } split /\n/, `cd '$folder' && find . ! -type d` }

# ---- install -------------------------------------------------------------------------------------------------

my $stage = "$dir/a stage";
my ($out) = make('install-files', "DESTDIR=$stage", 'PREFIX=/opt/gpt');
like($out, qr{^installed in \Q$stage\E/opt/gpt: train_gpt_cpu tokenize order2 train_gpt_\w+}m, 'says where and what');
my $at = "$stage/opt/gpt";
my %is = map { $_ => 1 } files($at);
ok($is{$_}, $_) for qw(bin/train_gpt_cpu bin/tokenize bin/order2 share/man/man1/train_gpt.1 share/man/man1/train_gpt_cpu.1
    share/bash-completion/completions/train_gpt share/bash-completion/completions/train_gpt_cpu share/zsh/site-functions/_train_gpt);
is(scalar(grep { !m{^(?:bin|share)/} } keys %is), 0, 'all of it in bin and share');

my ($text) = run_ok('the installed program', "$at/bin/train_gpt_cpu", '--help');
my @options = $text =~ /^  --(\S+)/mg;
cmp_ok(scalar @options, '>', 60, 'has its options');
write_shard('train_1.bin', documents(24000, 1));
write_shard('val.bin', documents(700, 2));
chdir $dir or die;
run_ok("seed $_", "$at/bin/train_gpt_cpu", @tiny, qw(--num-scheduled 3 --num-extension 1 --out), "$dir/runs$_", '--seed', $_) for 1, 2;
my @tools = map { m{([^/]+)$} } glob("'$at'/bin/train_gpt_*");
@tools = grep { $_ ne 'train_gpt_cpu' } @tools;
my $python = grep { -x "$_/python3" } split /:/, $ENV{PATH};
diag 'no python3 here: its tools are left out' if !$python;
for my $tool (@tools) {
    next if !$python && slurp("$at/bin/$tool") =~ /^#!.*python3/;
    my ($help) = run_ok("$tool --help", "$at/bin/$tool", '--help');
    like($help, qr/^usage: /m, 'says how it is used');
}
run_ok('a tool at work', "$at/bin/train_gpt_compare", '--output', "$dir/page.html", map { ('--set', $_, logs("$dir/runs$_", 'jsonl')) } 1, 2);
ok(-s "$dir/page.html", 'writes its page');
run_ok('a sweep', "$at/bin/train_gpt_sweep", '--out', "$dir/sweep", '--grid', 'seed=1', '--', "$at/bin/train_gpt_cpu", @tiny, qw(--num-scheduled 2 --num-extension 1));
chdir $root or die;

# ---- the manual page -----------------------------------------------------------------------------------------

my $page = slurp("$at/share/man/man1/train_gpt.1");
my @missing = grep { my $name = quotemeta("--$_" =~ s/-/\\-/gr); $page !~ /^\.B $name(?: |$)/m } @options;
is("@missing", '', 'the manual page has every option');
my @named = grep { $_ ne 'train_gpt_cpu' } $page =~ /\bfB(train_gpt_\w+)/g;
is(scalar @named, 3, 'and names some tools');
ok($is{"bin/$_"}, "which are installed: $_") for @named;
SKIP: {
    skip 'no groff here', 3 if system 'groff -v >/dev/null 2>&1';
    my ($shown, $warnings) = run_ok('groff', 'groff', '-man', '-Tutf8', '-ww', "$at/share/man/man1/train_gpt.1");
    is($warnings, '', 'has nothing to complain about');
    my $plain = $shown =~ s/.\x08|\e\[[0-9;]*m//gr =~ s/\s+/ /gr;
    my $wanted = qr/--ns kj\|you\|polar\|\S+ Newton.*EXIT STATUS 0 done 1 bad input .* 5 diverged/;
    ok($plain =~ $wanted, 'and shows options and exit statuses') or diag substr $plain, 0, 2000;
}
SKIP: {
    skip 'no man here', 1 if system 'man --version >/dev/null 2>&1';
    local $ENV{MANWIDTH} = 200;
    my ($shown) = run_ok('man -l', 'man', '-l', "$at/share/man/man1/train_gpt.1");
    like($shown, qr/train_gpt, train_gpt_cpu - train the GPT/, 'shows the page');
}

# ---- completions ---------------------------------------------------------------------------------------------

# What bash offers for the last of some words.
sub completed {
    my @words = @_;
    my $script = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _train_gpt; echo "${COMPREPLY[*]}"';
    my ($status, $out, $err) = run('bash', '-c', $script, 'bash', "$at/share/bash-completion/completions/train_gpt_cpu", 'train_gpt', @words);
    is("$status$err", '0', 'completes: ' . join ' ', @words);
    return $out =~ s/\n\z//r;
}
is(completed('--'), join(' ', map {"--$_"} @options), 'every option');
is(completed('--ns-t'), '--ns-tuples', 'one that begins so');
my ($presets) = $text =~ /^Presets, .*?\n(.*?)^\n/ms;
my @names = $presets =~ /^  (\S+)/mg;
is(completed('--preset', 'tiny-'), join(' ', grep { /^tiny-/ } @names), 'presets');
cmp_ok(scalar(grep { $_ eq 'tiny-2026' } @names), '==', 1, 'which --help names');
is(completed('--ns', 'tur'), 'turbo turbo-gram', 'a choice');
is(completed('--ns', '=', 'tur'), 'turbo turbo-gram', 'with =, which is a word of its own there');
is(completed('--ns', '='), 'kj you polar gram turbo turbo-gram', 'all choices');
is(completed('--seed', ''), '', 'no words for a number');
is(completed('--repeat', '--see'), '--seed', 'an option behind a flag');
is(completed('--seed', '3', '--see'), '--seed', 'and behind a value');
my ($registered) = run_ok('bash', 'bash', '-c', 'source "$1"; complete -p train_gpt train_gpt_cpu', 'bash', "$at/share/bash-completion/completions/train_gpt");
like($registered, qr/^complete -o default -F _train_gpt train_gpt\ncomplete .* train_gpt_cpu$/m, 'knows it for both programs');
my $zsh = slurp("$at/share/zsh/site-functions/_train_gpt");
like($zsh, qr/\A#compdef train_gpt train_gpt_cpu\n_arguments \\\n/, 'zsh: for both programs');
@missing = grep { $zsh !~ /^  '--\Q$_\E(?:=\[[^\]]+\]:\Q$_\E:|\[[^\]]+\]')/m } @options;
is("@missing", '', 'with every option');
SKIP: {
    skip 'no zsh here', 1 if system 'zsh --version >/dev/null 2>&1';
    run_ok('zsh reads it', 'zsh', '-n', "$at/share/zsh/site-functions/_train_gpt");
}

# ---- uninstall -----------------------------------------------------------------------------------------------

spew("$at/bin/train_gpt_own", "someone else's\n");
($out) = make('uninstall', "DESTDIR=$stage", 'PREFIX=/opt/gpt');
is(join(' ', files($stage)), 'opt/gpt/bin/train_gpt_own', 'takes away what was installed, and nothing else');
like($out, qr{^removed from \Q$stage\E/opt/gpt: order2 tokenize train_gpt_compare train_gpt_cpu (?:train_gpt_\w+ ?)+$}m, 'says what');
unlike($out, qr/train_gpt_own/, 'and names nothing else');
($out) = make('uninstall', "DESTDIR=$stage", 'PREFIX=/opt/gpt');
is($out, "removed from $stage/opt/gpt: nothing, no program was there\n", 'nor what is not there');

# ---- a release -----------------------------------------------------------------------------------------------

SKIP: {
    skip 'this is no git checkout', 6 if system 'git rev-parse HEAD >/dev/null 2>&1';
    my ($tarball) = (make('dist'))[0] =~ /^(\S+\.tar\.gz)$/m;
    ok($tarball && -s $tarball, 'a tarball') or last SKIP;
    my ($name) = $tarball =~ m{/(train_gpt-[^/]+)\.tar\.gz$};
    my @inside = split /\n/, `tar -tzf '$tarball'`;
    is(scalar(grep { !m{^\Q$name\E/} } @inside), 0, "holds the folder $name alone");
    is(scalar(grep { m{/(?:build|runs)/|\.o$|/train_gpt_cpu$} } @inside), 0, 'and nothing that is built');
    system('tar', '-xzf', $tarball, '-C', $dir) == 0 or die;
    chomp(my $commit = `git rev-parse HEAD`);
    # In a checkout of something else, whose commit it must not take for its own.
    system('git', 'init', '-q', $dir);
    run_ok('its source', "$dir/$name/scripts/embed_source.sh", "$dir/source.c");
    like(slurp("$dir/source.c"), qr/^const char program_commit\[\] = "[^"]+, commit $commit";$/m, 'names the commit');
    unlink $tarball;
}
done_testing;
