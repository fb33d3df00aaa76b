#!/usr/bin/env perl
# data/quickstart_text.sh without a network: imitated apt-get, dpkg-deb and curl hand it books this test writes itself, in
# R's database format and as Gutenberg prints them.
use strict;
use warnings;
use Compress::Zlib qw(compress);
use Cwd qw(abs_path);
use Encode qw(encode);
use File::Basename qw(dirname);
use File::Path qw(make_path);
use File::Temp qw(tempdir);
use JSON::PP qw(decode_json encode_json);
use FindBin;
use lib $FindBin::Bin;
use TrainTest qw(slurp);
use Test::More;

my $script = dirname(dirname(dirname(abs_path(__FILE__)))) . '/data/quickstart_text.sh';
my $dir = tempdir(CLEANUP => 1);
delete @ENV{qw(TEXT PASSAGE_BYTES GUTENBERG_URL)};

# ---- the books ---------------------------------------------------------------------------------------------------------

my $seed = 1;
sub random { $seed = ($seed * 1103515245 + 12345) % 2**31; return int($seed / 65536) % $_[0] }
my @words = map { join '', map { chr 97 + random(26) } 1 .. 2 + random(8) } 1 .. 500;

# Lines of a paragraph of a printed page, all words with the tag of their chapter so that a leak would show.
sub paragraph {
    my ($tag) = @_;
    my @sentences = map { ucfirst(join ' ', $tag, map { $words[random(500)] } 1 .. 5 + random(15)) . '.' } 1 .. 1 + random(12);
    my $text = join ' ', @sentences;
    my @lines;
    while ($text =~ /\G\s*(\S.{0,65})(?=\s|\z)/gc) { push @lines, $1 }
    return (@lines, '');
}

# Six books of 12 chapters; lines of each. Two volumes, a title page, and text with characters outside ASCII.
sub book {
    my ($i) = @_;
    my @lines = ("BOOK NUMBER $i", '', 'By An Author', '', '', 'VOLUME I', '', '');
    for my $chapter (1 .. 12) {
        push @lines, ($chapter % 2 ? "CHAPTER " . ('I') x $chapter : "Chapter $chapter"), '', '';
        @lines[-3] = "CHAPTER $chapter" if $chapter > 3;
        push @lines, paragraph("b${i}c$chapter") for 1 .. 90;
        push @lines, "A price of \x{A3}5 in b${i}c$chapter.", '';
        push @lines, 'VOLUME II', '' if $chapter == 6;
    }
    return (@lines, 'FINIS');
}
my @books = map { [book($_)] } 1 .. 6;

sub r_string { my $b = encode('UTF-8', $_[0]); pack('NN', $b =~ /[\x80-\xff]/ ? 0x8009 : 0x40009, length $b) . $b }

# A character vector in R's serialisation, version 3 or 2.
sub r_vector {
    my ($version, @lines) = @_;
    my $head = "X\n" . pack('N3', $version, 0x40201, 0x20300) . ($version == 3 ? pack('N', 5) . 'UTF-8' : '');
    return $head . pack('N2', 16, scalar @lines) . join '', map { r_string($_) } @lines;
}
sub r_database { join '', map { pack('N', length $_) . compress($_) } @_ }

sub write_file {
    my ($path, $bytes) = @_;
    make_path(dirname($path));
    open my $out, '>:raw', $path or die "$path: $!";
    print $out $bytes;
    close $out;
}
my $library = 'usr/lib/R/site-library/janeaustenr/data';
write_file("$dir/deb/$library/Rdata.rdb", r_database(map { r_vector($_ % 2 ? 3 : 2, @{$books[$_]}) } 0 .. 5));
my @numbers = (158, 141, 121, 105, 1342, 161);
for (0 .. 5) {
    my $contents = join '', map { "CHAPTER $_.\r\n\r\n" } 1 .. 12;
    my $text = "\x{FEFF}The Project eBook of a book\n\n*** START OF THE PROJECT GUTENBERG EBOOK A ***\r\n\r\n" . join("\r\n", @{$books[$_]}[0 .. 4]) . "\r\n$contents" . join("\r\n", @{$books[$_]}[5 .. $#{$books[$_]}]) . "\r\n\r\n*** END OF THE PROJECT GUTENBERG EBOOK A ***\r\nlicence b9c9 text\r\n";
    write_file("$dir/web/$numbers[$_]/pg$numbers[$_].txt", encode('UTF-8', $text));
}

# ---- running -----------------------------------------------------------------------------------------------------------

sub program {
    my ($name, $text) = @_;
    write_file("$dir/bin/$name", "#!/usr/bin/env bash\n$text\n");
    chmod 0755, "$dir/bin/$name";
}
my $apt_works = "echo \"\$*\" >>'$dir/calls'; case \"\$*\" in *download*) touch r-cran-janeaustenr_1.0.0-1_all.deb;; esac";
sub reset_programs {
    program('apt-get', $apt_works);
    program('dpkg-deb', "mkdir -p \"\$3\" && cp -r '$dir/deb/.' \"\$3\"");
    program('curl', "while [ \$# -gt 2 ]; do [ \"\$1\" = -o ] && o=\$2; shift; done; shift; cp \"\${1#https://books.test}\" \"\$o\"");
    unlink "$dir/calls";
}

# (status, stdout, stderr)
sub run_script {
    my (@arguments) = @_;
    my $pid = fork // die;
    if (!$pid) {
        $ENV{PATH} = "$dir/bin:$ENV{PATH}";
        $ENV{GUTENBERG_URL} //= "https://books.test$dir/web";
        open STDOUT, '>', "$dir/stdout" or die;
        open STDERR, '>', "$dir/stderr" or die;
        exec $script, @arguments or die;
    }
    waitpid $pid, 0;
    return ($? >> 8, map { slurp("$dir/$_") } 'stdout', 'stderr');
}

sub records { map { decode_json($_) } split /\n/, slurp($_[0]) }
sub listing { opendir my $d, $_[0] or return ''; join ' ', sort grep { !/^\.\.?$/ } readdir $d }
my $FILES = 'SOURCE text.jsonl train.jsonl val.jsonl';

# ---- the novels --------------------------------------------------------------------------------------------------------

reset_programs();
my ($status, $out, $err) = run_script('--out', "$dir/a");
is($status, 0, 'by apt: exit 0') or diag("$out$err");
like($out, qr/public domain.*r-cran-janeaustenr_1\.0\.0-1/, 'prints what it took, with its licence');
is(listing("$dir/a"), $FILES, 'the files, and nothing left over');
my @all = records("$dir/a/text.jsonl");
my @train = records("$dir/a/train.jsonl");
my @val = records("$dir/a/val.jsonl");

my $expected = join ' ', map { my @b = @$_; grep { /\S/ && !/^(?:BOOK|By An|VOLUME|CHAPTER|Chapter|FINIS)/ } @b } @books;
is(join(' ', map { $_->{text} =~ s/\s+/ /gr } @all), $expected, 'all the text of the chapters, in order, and nothing else');
is_deeply([sort map { $_->{text} } @train, @val], [sort map { $_->{text} } @all], 'every document is in one of the two sets');
ok(!(grep { length encode('UTF-8', $_->{text}) > 1000 } @all), 'no document above the size');
my %chapters_of = map { $_ => {map { $_->{source} => 1 } $_ eq 'val' ? @val : @train} } 'val', 'train';
is(scalar(keys %{$chapters_of{val}}), 7, 'every tenth of 72 chapters is for validation');
ok(!(grep { $chapters_of{train}{$_} } keys %{$chapters_of{val}}), 'no chapter is in both sets');
my %tags = map { ($_->{text} =~ /(b\dc\d+)/g)[0] => $_->{source} } @val;
ok(!(grep { my $t = $_->{text}; grep { $tags{$_} } $t =~ /(b\dc\d+)/g } @train), 'and no sentence of a validation chapter in training');
is($all[0]{source}, 'Book Number 1, chapter 1', 'the source is named');
isnt($train[0]{source}, $train[1]{source}, 'training documents are mixed');
my $first = slurp("$dir/a/train.jsonl");
($status, $out, $err) = run_script('--out', "$dir/b");
is(slurp("$dir/b/train.jsonl"), $first, 'the same files every time');
unlink "$dir/calls";
($status, $out) = run_script('--out', "$dir/a");
ok($status == 0 && $out =~ /there already/ && !-e "$dir/calls", 'a second call fetches nothing');
{
    local $ENV{PASSAGE_BYTES} = 400;
    ($status, $out) = run_script('--out', "$dir/a");
    my @short = records("$dir/a/text.jsonl");
    ok($status == 0 && !(grep { length encode('UTF-8', $_->{text}) > 400 } @short), 'another document size: made anew');
    is(join(' ', map { $_->{text} =~ s/\s+/ /gr } @short), $expected, 'and no text lost where long paragraphs are cut');
}

# Package lists missing: fetched into a private folder.
program('apt-get', "case \"\$*\" in *'lists='*update*) : >'$dir/updated';; *'lists='*) [ -e '$dir/updated' ] && touch r-cran-janeaustenr_1.0.0-1_all.deb;; *) echo 'E: Unable to locate package'; exit 100;; esac");
($status, $out, $err) = run_script('--out', "$dir/c");
ok($status == 0 && slurp("$dir/c/train.jsonl") eq $first, 'no package lists: own ones are fetched') or diag("$out$err");

# No apt: the web gives the same chapters.
program('apt-get', 'echo "E: no network"; exit 100');
($status, $out, $err) = run_script('--out', "$dir/d");
ok($status == 0 && $out =~ /cannot download r-cran-janeaustenr: E: no network.*Gutenberg/s, 'apt-get without network: the web') or diag("$out$err");
is_deeply([map { $_->{text} } records("$dir/d/text.jsonl")], [map { $_->{text} } @all], 'the same documents from Gutenberg, without its header, contents and licence');
program('curl', 'echo "curl: (6) no host" >&2; exit 6');
($status, $out, $err) = run_script('--out', "$dir/e");
ok($status == 1 && $err =~ /\Aquickstart_text: error: no text could be fetched[^\n]*TEXT=path[^\n]*\n\z/ && $out =~ /curl: \(6\)/, 'nothing reachable: one clear error') or diag("$out$err");
is(listing("$dir/e"), '', 'and nothing left over');

# Damaged packages.
reset_programs();
my $good = slurp("$dir/deb/$library/Rdata.rdb");
for (
    ['cut short', substr($good, 0, length($good) - 1000)], ['of another compression', pack('N', 9) . '2' . 'x' x 99], ['empty', ''],
    ['with another object', r_database("X\n" . pack('N5', 2, 0x40201, 0x20300, 13, 0))], ['with a wrong count', r_database("X\n" . pack('N5', 2, 0x40201, 0x20300, 16, 2**31))],
    ['with a wrong length', r_database("X\n" . pack('N7', 2, 0x40201, 0x20300, 16, 1, 0x40009, 2**30))], ['too small', r_database(r_vector(3, @{$books[0]}))],
  )
{
    my ($what, $bytes) = @$_;
    write_file("$dir/deb/$library/Rdata.rdb", $bytes);
    ($status, $out, $err) = run_script('--out', "$dir/f", '--from', 'apt');
    ok($status == 1 && $err =~ /\Aquickstart_text: error: [^\n]*Rdata\.rdb[^\n]*\nquickstart_text: error: [^\n]*\n\z/ && listing("$dir/f") eq '', "a package $what") or diag("$status $out$err");
}

# ---- own text ----------------------------------------------------------------------------------------------------------

my $own = join "\n", @{$books[0]}, @{$books[1]};
write_file("$dir/own/a.txt", encode('UTF-8', $own));
write_file("$dir/own/b.txt", "bad \xff bytes\n\n");
write_file("$dir/own/c.md", "not taken\n");
{
    local $ENV{TEXT} = "$dir/own";
    ($status, $out, $err) = run_script('--out', "$dir/g");
}
@all = records("$dir/g/text.jsonl");
ok($status == 0 && $all[-1]{text} eq "bad \x{FFFD} bytes" && !(grep { $_->{text} =~ /not taken/ } @all), 'TEXT: a folder of *.txt; invalid bytes replaced') or diag($err);
is(join(' ', map { $_->{text} =~ s/\s+/ /gr } @all[0 .. $#all - 1]), join(' ', split ' ', $own), 'own text: complete and in order');
my $share = length(slurp("$dir/g/val.jsonl")) / length(slurp("$dir/g/text.jsonl"));
ok($share > 0.05 && $share < 0.15, sprintf 'own text: %.3f of it for validation', $share);
write_file("$dir/own.jsonl", join '', map { encode_json({text => $_->{text}, other => 1}) . "\n" } @all);
($status) = run_script('--text', "$dir/own.jsonl", '--out', "$dir/h");
is_deeply([map { $_->{text} } records("$dir/h/text.jsonl")], [map { $_->{text} } @all], 'JSONL: each record its own documents');
write_file("$dir/long.txt", 'x' x 99_999 . "\x{e6}\x{bc}\x{a2}" x 30_000);
($status) = run_script('--text', "$dir/long.txt", '--out', "$dir/i");
is(encode('UTF-8', join '', map { $_->{text} } records("$dir/i/text.jsonl")), slurp("$dir/long.txt"), 'text without a space: cut between characters');

write_file("$dir/small.txt", "too small\n");
write_file("$dir/bad.jsonl", qq({"text":"a"}\n{"txt":"b"}\n));
make_path("$dir/nothing");
for (["$dir/absent", qr/cannot be read/], ["$dir/nothing", qr/holds no \*\.txt/], ["$dir/small.txt", qr/9 bytes of text; at least 45000/], ["$dir/bad.jsonl", qr/line 2: not a JSON object/], ['/dev/zero', qr/not a regular file/]) {
    ($status, $out, $err) = run_script('--text', $_->[0], '--out', "$dir/g");
    ok($status == 1 && $err =~ /\Aquickstart_text: error: [^\n]*\n\z/ && $err =~ $_->[1] && listing("$dir/g") eq $FILES, "refused, the old files stay: $_->[1]") or diag("$status $err");
}
for ([qr/unknown option "--x"/, '--x'], [qr/--from is apt or web/, '--from', 'disk'], [qr/--out needs a value/, '--out'], [qr/exclude each other/, '--from', 'web', '--text', $script, '--out', "$dir/j"]) {
    my ($pattern, @arguments) = @$_;
    ($status, $out, $err) = run_script(@arguments);
    ok($status == 2 && $err =~ $pattern, "usage: $pattern") or diag("$status $err");
}
done_testing();
