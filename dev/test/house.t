#!/usr/bin/env perl
# The form of the source: lines of at most 110 columns, one statement a line, the layout of .clang-format, the field's words, and no
# tensor named outside of the records' tables.
use strict;
use warnings;
use Cwd qw(abs_path);
use File::Basename qw(dirname);
use File::Find qw(find);
use Test::More;

chdir dirname(dirname(dirname(abs_path(__FILE__)))) or die;

my @files;
find({no_chdir => 1, wanted => sub { push @files, $_ if -f && !/\.swp$/ }}, 'llmc', 'data', 'dev');
my @sources = sort 'train_gpt.cu', grep { /\.(?:c|h|cu|cuh)$/ } @files;
cmp_ok(scalar @sources, '>', 200, 'sources are found: ' . @sources);
sub slurp { my ($path) = @_; open my $f, '<', $path or die "$path: $!\n"; local $/; return scalar(<$f>) // '' }
my %text = map { $_ => slurp($_) } @sources;
sub none { my ($what, @found) = @_; is(join("\n", @found), '', $what) }

my $comment = qr{//(?:[^\n\\]|\\.)*|/\*.*?\*/}s;
my $literal = qr{"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'}s;

# The text with blanks in place of comments, literals and preprocessor lines; what is left stands where it was.
sub code {
    my ($text) = @_;
    $text =~ s{$comment|$literal}{$& =~ s/[^\n]/ /gr}ge;
    return $text =~ s{^[ \t]*#(?:[^\n\\]|\\.)*}{$& =~ s/[^\n]/ /gr}gmser;
}

# ---- lines ---------------------------------------------------------------------------------------------------

my @long;
for my $file (@sources) {
    my ($by_hand, $number) = (0, 0);
    for my $line (split /\n/, $text{$file}) {
        $number++;
        $by_hand = 1 if $line =~ m{// clang-format off};
        $by_hand = 0 if $line =~ m{// clang-format on};
        push @long, "$file:$number" if length $line > 110 && !$by_hand;
    }
}
none('no line is longer than 110 columns, but in tables', @long);

# ---- statements ----------------------------------------------------------------------------------------------

# How an expression begins: a call, an assignment, an increment; a declaration begins with two words. if, for and while look like calls.
my $name = qr/[A-Za-z_][\w.]*(?:\[[^\]]*\]|->|\w|\.)*/;
my $expression = qr/^\s*(?:(?:else|do|return|case\b[^:;]*:|default:)\s*)*(?!(?:alignas|__align__|__attribute__)\b)
    (?:\(void\)\s*)?(?:\+\+|--|\*)*$name\s*(?:\(|\+\+|--|(?:[-+*\/%|&^]|<<|>>)?=[^=])/x;

# Statements of several expressions, "a(), b();": their lines.
sub comma_statements {
    my ($code) = @_;
    1 while $code =~ s/(?<=\w)<([^<>;(){}]*)>(?=\s*(?:\(|<<<|::))/'_' . $1 =~ s{[^\n]}{_}gr . '_'/e; # arguments of templates
    $code =~ s/<<<|>>>/$& eq '<<<' ? '(((' : ')))'/ge; # of launches
    my ($depth, $start, $comma, @lines) = (0, 0, 0);
    while ($code =~ /([()\[\]{};,])/g) {
        my ($mark, $at) = ($1, $-[0]);
        if ($mark =~ /[(\[]/) { $depth++ }
        elsif ($mark =~ /[)\]]/) { $depth-- }
        elsif ($depth) { next }
        elsif ($mark eq ',') { $comma = 1 }
        else {
            my $statement = substr $code, $start, $at - $start;
            push @lines, 1 + substr($code, 0, $at) =~ tr/\n// if $mark eq ';' && $comma && $statement =~ $expression;
            ($start, $comma) = ($at + 1, 0);
        }
    }
    return @lines;
}
is(join(' ', comma_statements("{\n int a = 1, b;\n f(a, b);\n f(a),\n g(b);\n x[1] = 2, y++;\n for (i = 0, j = 1; i < n; i++, j++)\n h<T, a == 1>(a);\n k<1, 2><<<a, b>>>(c);\n}\n")), '5 6', 'statements with a comma are found');
none('and the source has none', map { my $file = $_; map { "$file:$_" } comma_statements(code($text{$file})) } @sources);

# ---- parameters of the CPU's ops -----------------------------------------------------------------------------

# gcc does not warn of them in llmc/cpu (cpu.h): an op there reads all that it is given but the stream and the context of its contract.
sub unread_parameters {
    my ($code) = @_;
    my @unread;
    while ($code =~ /^\w[\w *]*?(\w+)\(([^(){};]*)\)\s*\{(?:([^\n]*)\}$|\n(.*?)^\})/gms) {
        my ($function, $parameters, $body) = ($1, $2, $3 // $4);
        for my $parameter (split /,/, $parameters) {
            my ($type, $name) = $parameter =~ /^\s*(.*?)(\w+)\s*(?:\[.*)?$/s or next;
            push @unread, "$function: $name" unless $type =~ /^(?:Stream |const ProductContext \*|)$/ || $body =~ /\b$name\b/;
        }
    }
    return @unread;
}
is(join(' ', unread_parameters("void f(Stream s, int n, const ProductContext *c)\n{\n    if (1) {\n    }\n    g();\n}\nint h(int a[2], B *b) { return *b; }\n")), 'f: n h: a', 'unread parameters are found');
my $cpu = join '', map { $text{$_} } grep { m{^llmc/cpu/} } @sources;
cmp_ok(scalar(() = $cpu =~ /Stream s,/g), '>', 60, 'ops of the CPU are found');
none('and ops of the CPU have none but streams and contexts', map { my $file = $_; map { "$file: $_" } unread_parameters($text{$file} =~ s{$comment}{}gr) } grep { m{^llmc/cpu/} } @sources);

# ---- layout --------------------------------------------------------------------------------------------------

# Versions of clang-format lay out some things differently. The tables of records are laid out by hand.
SKIP: {
    my $version = (`clang-format --version 2>/dev/null` // '') =~ /version (\d+)/ ? $1 : 'none';
    skip "clang-format 14 is not here ($version)", 1 if $version ne '14';
    my %changed = map { $_ => 1 } `clang-format --dry-run @{[grep { !m{^llmc/records/} } @sources]} 2>&1` =~ /^(\S+?):\d+:\d+: warning/mg;
    none('clang-format has nothing to change', sort keys %changed);
}

# ---- words ---------------------------------------------------------------------------------------------------

# The field's words are tile-scheduler warp, TMA-store warp, staging buffer, TMA, fence_proxy_async, wgmma_fence, control channel, output
# tile, sm90 GEMM, tail tile, remainder.
my $instead = qr/\b(?:scouts?|clerks?|desks?|copy[ _.-]?units?|copy_unit_fence\w*|hubs?|wide[ _](?:tile|product)s?|late[ _]squares?|last[ _]turn|left[ _]over
    |products_begin|tell_part|hear_part)\b/ix;
my @words;
for my $file ('README.md', 'dev/README.md', grep { m{^llmc/} } @sources) {
    my $text = $text{$file} // slurp($file);
    push @words, "$file:" . (1 + substr($text, 0, $-[0]) =~ tr/\n//) . ": $&" while $text =~ /$instead/g;
}
none("words are the field's", @words);

# ---- the record is a table -----------------------------------------------------------------------------------

# Names of tensors stand in the tables of the records, and in no other file of the program.
my %tensor = map { $_ => 1 } map { $text{$_} =~ /\{ROLE_\w+,\s*"([^"]+)"/g } grep { m{^llmc/records/} } @sources;
cmp_ok(scalar keys %tensor, '>=', 9, 'tensors are found: ' . keys %tensor);
my $tensors = join '|', map { quotemeta =~ s/\\%d/(?:\\d+|%d)/gr } sort keys %tensor;
my @named;
for my $file ('train_gpt.cu', grep { m{^llmc/} && !m{^llmc/records/} } @sources) {
    my $text = $text{$file} =~ s{$comment|($literal)}{$1 // ''}ger;
    push @named, "$file: $&" while $text =~ /"(?:$tensors)"/g;
}
none('nothing outside of llmc/records/ names a tensor', @named);
unlike(slurp('Makefile'), qr/--wrap/, 'and the linker puts nothing between a call and its function');
done_testing;
