#!/usr/bin/env perl
# Cuts English text into documents and splits them into training and validation; called by quickstart_text.sh.
#
#   quickstart_text.pl rdb|gutenberg|own PASSAGE_BYTES OUT PATH...
#
# Books are cut into chapters, chapters into passages of whole paragraphs of at most PASSAGE_BYTES: that is a document. Every
# tenth chapter, not every tenth passage, is for validation, so that no training passage continues one of those.
# Writes OUT/text.jsonl (all, in the order of the text), train.jsonl and val.jsonl, records {"source": ..., "text": ...}. The
# latter two are in an order that looks random but is always the same, so that every batch is a sample of the whole.
use strict;
use warnings;
use Compress::Zlib qw(inflateInit Z_STREAM_END);
use Digest::MD5 qw(md5);
use Encode ();
use JSON::PP ();

my $MAX_OWN_BYTES = 20_000_000; # quickstart runs for minutes: more text would only cost time
my $MIN_BYTES = 45_000; # of passages: a file of 50 kB less what stands between its paragraphs
my $VALIDATION_EVERY = 10;
my $SECTION_BYTES = 16_000; # about a chapter, for text without chapters

if (@ARGV && $ARGV[0] eq '--help') {
    open my $self, '<', $0 or die "$0: $!\n";
    while (<$self>) { next if /^#!/; last if !/^#/; print s/^# ?//r }
    exit 0;
}

sub fail
{
    my $line = join('', @_) =~ s/([\x00-\x1f\x7f])/sprintf '\\x%02x', ord $1/ger; # names may hold anything
    print STDERR "quickstart_text: error: $line\n";
    exit 1;
}

sub read_file {
    my ($path) = @_;
    fail("$path is not a regular file") if -e $path && !-f _; # opening a FIFO would wait for its writer
    open my $in, '<:raw', $path or fail("$path cannot be read: $!");
    local $/;
    my $bytes = <$in>;
    fail("$path cannot be read: $!") if !defined $bytes;
    return $bytes;
}

# Text that is not UTF-8 gets U+FFFD where it breaks off, as the tokenizer does it.
sub decoded {
    my ($bytes) = @_;
    my $text = Encode::decode('UTF-8', $bytes, Encode::FB_DEFAULT);
    $text =~ s/\A\x{FEFF}//;
    $text =~ s/\r\n?/\n/g;
    return $text;
}

# ---- books out of an R package -----------------------------------------------------------------------------------------

# A lazy-load database of R: for each object, 4 bytes big-endian of its size, then a zlib stream with the serialised object.
# Returns the text of every character vector in it, one line per element.
sub texts_of_rdb {
    my ($path) = @_;
    my $rest = read_file($path);
    my @texts;
    while (length $rest) {
        fail("$path: cut short") if length $rest < 5;
        my $size = unpack 'N', substr $rest, 0, 4, '';
        my ($object, $status) = inflateInit()->inflate($rest); # takes the stream off $rest
        fail("$path: not an R database with zlib compression") if !defined $object || $status != Z_STREAM_END || length $object != $size;
        push @texts, join "\n", character_vector($path, $object);
    }
    return @texts;
}

# R's binary serialisation, big-endian ("X\n"), versions 2 and 3, of one character vector. See "R Internals", section 1.8.
sub character_vector {
    my ($path, $object) = @_;
    my $at = 2;
    my $integer = sub { fail("$path: an object is cut short") if $at + 4 > length $object; my $i = unpack 'N', substr $object, $at, 4; $at += 4; $i };
    fail("$path: not R's binary format") if substr($object, 0, 2) ne "X\n";
    my $version = $integer->();
    $integer->() for 1 .. 2; # versions of R: the writer's, the oldest reader's
    if ($version == 3) { $at += $integer->() } # name of the native encoding
    my ($type, $count) = ($integer->() & 255, $integer->());
    fail("$path: an object is not a character vector") if $type != 16;
    my @lines;
    for (1 .. $count) {
        my ($flags, $length) = ($integer->(), $integer->());
        fail("$path: an element is not a string") if ($flags & 255) != 9;
        if ($length == 0xFFFFFFFF) { push @lines, ''; next } # NA
        fail("$path: an object is cut short") if $at + $length > length $object;
        my $bytes = substr $object, $at, $length;
        $bytes = Encode::encode('UTF-8', Encode::decode('ISO-8859-1', $bytes)) if $flags & 1 << 14; # bit 2 of "gp": Latin-1
        push @lines, $bytes;
        $at += $length;
    }
    return @lines;
}

# ---- chapters, passages ------------------------------------------------------------------------------------------------

# Paragraphs, each as one line: line breaks of a printed page carry no meaning.
sub paragraphs {
    my ($text) = @_;
    return grep { length } map { s/\s+/ /g; s/\A | \z//g; $_ } split /\n\s*\n/, $text;
}

# Paragraphs of own text, whose lines stay: they may be verse, names above speeches, a list.
sub paragraphs_as_they_are {
    my ($text) = @_;
    return grep { length } map { s/[ \t]+$//gmr =~ s/\A\n+|\n+\z//gr } split /\n\s*\n/, $text;
}

# Books that open a chapter with a line of its own -> (["Emma, chapter 3", paragraph, ...], ...). What stands before the
# first chapter, and the headings themselves, are left out; a table of contents gives chapters without text.
sub chapters {
    my ($book) = @_;
    $book =~ s/\A.*?\*\*\* ?START OF[^\n]*\n//s;
    $book =~ s/\*\*\* ?END OF.*\z//s;
    my ($title) = grep { /[A-Za-z]/ && !/illustration/i } paragraphs($book);
    $title = join ' ', map { ucfirst lc } split / /, $title // 'Book';
    $title =~ s/ By .*//;
    $title =~ s/\b(And|Of|The)\b/lc $1/ge;
    my (@chapters, $number);
    for my $block (split /\n\s*\n/, $book) {
        next if $block =~ /\A\s*(?:VOLUME|Volume|FINIS|THE END|END OF VOL)\b[^\n]{0,40}\s*\z/;
        if ($block =~ /\A\s*(?:CHAPTER|Chapter) (?:[IVXLC]+|[0-9]+)\.?\]?\s*\z/) {
            push @chapters, [$title . ', chapter ' . (1 + grep { @$_ > 1 } @chapters)];
        } elsif (@chapters && $block !~ /\A\s*\[(?:Illustration|Transcriber)/i) {
            push @{$chapters[-1]}, paragraphs($block);
        }
    }
    return grep { @$_ > 1 } @chapters;
}

# Text without chapters, in runs of about $bytes: (["name, part 1", paragraph, ...], ...).
sub sections {
    my ($bytes, $name, @paragraphs) = @_;
    my ($size, @sections) = (0);
    for (@paragraphs) {
        push @sections, ["$name, part " . (@sections + 1)] if !@sections || $size >= $bytes;
        $size = 0 if @{$sections[-1]} == 1;
        push @{$sections[-1]}, $_;
        $size += length Encode::encode('UTF-8', $_);
    }
    return @sections;
}

sub bytes_of { length Encode::encode('UTF-8', $_[0]) }

# Cuts a paragraph that is longer than the limit: after a sentence, else at a space, else anywhere.
sub pieces {
    my ($limit, $paragraph) = @_;
    my $bytes = Encode::encode('UTF-8', $paragraph); # where a position is found at once, however long the text
    my ($at, @pieces) = (0);
    while (length($bytes) - $at > $limit) {
        my $head = substr $bytes, $at, $limit;
        $head =~ s/[\xC0-\xFF][\x80-\xBF]*\z// if ord(substr $bytes, $at + $limit, 1) >> 6 == 2; # no character cut in two
        if ($head =~ /\A(.{100,}[.!?]["')_]?)[ \n]/s) { $head = $1 }
        elsif ($head =~ /\A(.+)[ \n]/s) { $head = $1 }
        push @pieces, $head;
        $at += length $head;
        $at++ if substr($bytes, $at, 1) =~ /[ \n]/;
    }
    push @pieces, substr $bytes, $at if $at < length $bytes;
    return map { Encode::decode('UTF-8', $_) } @pieces;
}

sub passages {
    my ($limit, @paragraphs) = @_;
    my @passages;
    for my $piece (map { pieces($limit, $_) } @paragraphs) {
        my $joined = @passages ? "$passages[-1]\n\n$piece" : '';
        if (@passages && bytes_of($joined) <= $limit) { $passages[-1] = $joined }
        else { push @passages, $piece }
    }
    return @passages;
}

# ---- own text ----------------------------------------------------------------------------------------------------------

# (file name, text) of every document of a file, a folder of *.txt in name order, or JSONL.
sub own_documents {
    my ($path) = @_;
    my @files = $path;
    if (-d $path) {
        opendir my $dir, $path or fail("$path cannot be read: $!");
        @files = map { "$path/$_" } sort grep { /\.txt\z/ && !/\A\./ } readdir $dir;
        fail("$path holds no *.txt file") if !@files;
    }
    my ($bytes, @documents) = (0);
    for my $file (@files) {
        for my $text ($file =~ /\.jsonl\z/ ? json_texts($file) : read_file($file)) {
            $bytes += length $text;
            push @documents, [$file =~ s{.*/}{}r, decoded($text)];
        }
        if ($bytes > $MAX_OWN_BYTES) {
            print STDERR "quickstart_text: note: only about the first $MAX_OWN_BYTES bytes of $path are used\n";
            $documents[-1][1] = substr $documents[-1][1], 0, $MAX_OWN_BYTES;
            last;
        }
    }
    return @documents;
}

# The "text" fields of JSONL, as UTF-8 bytes.
sub json_texts {
    my ($file) = @_;
    fail("$file is not a regular file") if -e $file && !-f _;
    open my $in, '<:raw', $file or fail("$file cannot be read: $!");
    my ($bytes, @texts) = (0);
    while (my $line = <$in>) {
        next if $line !~ /\S/;
        my $record = eval { JSON::PP::decode_json($line) };
        my $text = ref $record eq 'HASH' ? $record->{text} : undef;
        fail("$file: line $.: not a JSON object with a string \"text\"") if !defined $text || ref $text;
        push @texts, Encode::encode('UTF-8', $text);
        $bytes += length $texts[-1];
        last if $bytes > $MAX_OWN_BYTES;
    }
    return @texts;
}

sub own_sections {
    my ($limit, $path) = @_;
    my @documents = own_documents($path);
    my $total = 0;
    $total += bytes_of($_->[1]) for @documents;
    # Small texts are cut finer, so that a tenth of the sections is still a tenth of the text.
    my $bytes = $total / 40 < $SECTION_BYTES ? $total / 40 : $SECTION_BYTES;
    return map { sections($bytes, $_->[0], map { pieces($limit, $_) } paragraphs_as_they_are($_->[1])) } @documents;
}

# ---- the program -------------------------------------------------------------------------------------------------------

my ($kind, $limit, $out, @paths) = @ARGV;
my @chapters =
    $kind eq 'rdb'       ? map { chapters(decoded($_)) } texts_of_rdb($paths[0])
  : $kind eq 'gutenberg' ? map { chapters(decoded(read_file($_))) } @paths
  :                        own_sections($limit, $paths[0]);

my $json = JSON::PP->new->utf8->canonical;
my (%records, %bytes);
$records{$_} = [], $bytes{$_} = 0 for qw(text train val);
for my $i (0 .. $#chapters) {
    my ($source, @paragraphs) = @{$chapters[$i]};
    for my $passage (passages($limit, @paragraphs)) {
        my $record = $json->encode({source => $source, text => $passage}) . "\n";
        for my $name ('text', $i % $VALIDATION_EVERY == $VALIDATION_EVERY / 2 ? 'val' : 'train') {
            push @{$records{$name}}, $record;
            $bytes{$name} += bytes_of($passage);
        }
    }
}
for my $name (sort keys %records) {
    my @ordered = @{$records{$name}};
    @ordered = map { $_->[1] } sort { $a->[0] cmp $b->[0] } map { [md5($_), $_] } @ordered if $name ne 'text';
    open my $file, '>:raw', "$out/$name.jsonl" or fail("$out/$name.jsonl cannot be written: $!");
    (print $file @ordered and close $file) or fail("$out/$name.jsonl cannot be written: $!");
}
my %count = map { $_ => scalar @{$records{$_}} } keys %records;
my $least = $kind eq 'own' ? $MIN_BYTES : 3_000_000;
fail("@paths: $bytes{text} bytes of text; at least $least are needed") if $bytes{text} < $least || !$count{val};
print "quickstart_text: $bytes{text} bytes in $count{text} documents: $count{train} for training, $count{val} ($bytes{val} bytes) for validation\n";
