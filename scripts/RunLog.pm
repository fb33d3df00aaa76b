# Reads the log file of a training run. The format is fixed to the character, because logs are evidence:
#
#   source of the program, "=" x 100, version lines and the output of nvidia-smi, "=" x 100, then
#   step:S/T val_loss:%.4f train_time:%.0fms step_avg:%.2fms    at validations, before the training step of that index
#   step:S/T train_time:%.0fms step_avg:%.2fms                  after every training step, S from 1
#   profile: ...                                                lines of the table of a profiled run; they are passed over
#   evaluation: ...                                             results of --eval; they are passed over
#   validation data: sha256 H, vocabulary of V ids, N tokens predicted       of the shard; "SHA-256 not known" in place of sha256 H
#   peak memory allocated: A MiB reserved: R MiB                at the end
package RunLog;

use strict;
use warnings;
use Digest::SHA qw(sha256_hex);
use File::Basename qw(basename);
use File::Glob qw(bsd_glob);

my $SEPARATOR = '=' x 100;
my $INTEGER = qr/0|[1-9][0-9]*/;
my $LOSS = qr/-?[0-9]+\.[0-9]{4}|[+-]?nan|[+-]?inf/i;
my $TIMES = qr/train_time:($INTEGER)ms step_avg:((?:$INTEGER)\.[0-9]{2})ms/;
my $MAX_BYTES = 256 << 20;

# open_file($path) -> a handle that gives bytes. Dies with one line for anything that is not a readable regular
# file of a sensible size.
sub open_file {
    my ($path) = @_;
    die "$path: no such file\n" if !-e $path;
    die "$path: not a regular file; give the log files of the runs\n" if !-f _;
    die "$path: " . (-s _) . " bytes; no log of a run is that large\n" if (-s _ // 0) > $MAX_BYTES;
    open my $in, '<:raw', $path or die "$path: cannot be read: $!\n";
    return $in;
}

# read_file($path) -> the bytes, one at least.
sub read_file {
    my ($path) = @_;
    my $in = open_file($path);
    local $/;
    my $bytes = <$in> // die "$path: cannot be read: $!\n";
    die "$path: empty\n" if $bytes eq '';
    return $bytes;
}

# parse($path) -> {
#   path, name       as given, and without its folders
#   source           SHA-256 of the source part
#   versions         [lines before the output of nvidia-smi, the command line excepted]
#   validation       {sha256, vocabulary, tokens} of the shard that was validated on; undef where the log does not say
#   preset           the preset's name in the command line, '' without any
#   command          the command line, without what may differ between runs of one experiment (seed, output folder)
#   resumed          where a resumed run began, "from step 13, FILE"; '' for a run from its first step
#   gpus             the GPUs of the run by nvidia-smi's table and the number of ranks, as "8 x NVIDIA H200"; '' without any
#   total            T
#   validations      [[step, loss, train_time in ms], ...]; a loss may be NaN or infinite
#   steps            [[step, train_time in ms], ...]
#   allocated, reserved   MiB, only when the run came to its end
#   metrics          SHA-256 of the part after the second separator
# }
# Dies with one line, "path: line N: ...", for a file that is not such a log. A log that merely stops early
# is parsed (a half-written last line is left out); unfinished() says what it lacks.
sub parse {
    my ($path) = @_;
    my $bytes = read_file($path);
    my @lines = split /\n/, $bytes, -1;
    my $complete = $lines[-1] eq '' ? 1 : 0; # the last line has its newline
    pop @lines if $complete;
    my @separators = grep { $lines[$_] eq $SEPARATOR } 0 .. $#lines;
    die "$path: not the log of a run: it needs two lines of 100 '=' and has " . @separators . "\n"
        if @separators < 2;

    # The source may itself hold such a line; what follows it cannot, so the last two count.
    my ($first, $second) = @separators[-2, -1];
    my $log = {path => $path, name => basename($path), validations => [], steps => []};
    $log->{source} = sha256_hex(join "\n", @lines[0 .. $first - 1]);
    die "$path: the source part is empty\n" if !grep {/\S/} @lines[0 .. $first - 1];
    parse_header($log, @lines[$first + 1 .. $second - 1]);
    my @metrics = @lines[$second + 1 .. $#lines];
    $log->{metrics} = sha256_hex(join "\n", @metrics);
    pop @metrics if @metrics && !$complete && $metrics[-1] !~ / MiB\z/;
    parse_line($log, $metrics[$_], $second + 2 + $_) for 0 .. $#metrics;
    return $log;
}

# The part between the separators.
sub parse_header {
    my ($log, @lines) = @_;
    # nvidia-smi prints a date and a framed table; both change from minute to minute, so versions end before
    # them.
    my ($smi) = grep {
        $lines[$_] =~ /^\+-{10}|^[A-Z][a-z]{2} [A-Z][a-z]{2} [ 0-9]{2} [0-9:]{8} [0-9]{4}\s*$|nvidia-smi/i
    } 0 .. $#lines;
    $smi //= @lines;
    my @versions = @lines[0 .. $smi - 1];
    my ($command) = grep {/^command line\b/i} @versions;
    ($command) = grep {/train_gpt/} @versions if !defined $command;
    ($log->{resumed}) = map {/^resumed: (.*)/} @versions;
    $log->{resumed} = printable($log->{resumed} // '');
    @versions = grep { !/^resumed: / } @versions;
    $log->{versions} = [grep { /\S/ && !(defined $command && $_ eq $command) } @versions];
    $log->{command} = defined $command ? without_run_options($command) : '';
    $log->{preset} = $log->{command} =~ /.* --preset(?:=| )(\S+)/ ? $1 : ''; # the last one counts

    my %count;
    for (@lines[$smi .. $#lines]) { $count{$1}++ if /^\|\s+[0-9]+\s+(\S.*?)\s+(?:On|Off|N\/A)\s*\|/ }
  # The table has all GPUs of one machine; the run may have used fewer, or those of more machines: one a rank.
    my ($ranks) = map {/^ranks: ([0-9]+)/} @versions;
    $count{(keys %count)[0]} = $ranks if defined $ranks && keys %count == 1;
    $log->{gpus} = join ', ', map {"$count{$_} x $_"} sort keys %count;
}

# Runs of one experiment differ in seed and in where they write; nothing else may.
sub without_run_options {
    my ($command) = @_;
    $command =~ s/ --(?:seed|out)(?:=| +)(?:'[^']*'|"[^"]*"|\S+)//g;
    return $command;
}

sub parse_line {
    my ($log, $line, $number) = @_;
    my $where = "$log->{path}: line $number";
    die "$where: a line after the end of the run\n" if defined $log->{allocated};
    if ($line =~ /\Apeak memory allocated: ($INTEGER) MiB reserved: ($INTEGER) MiB\z/) {
        @$log{qw(allocated reserved)} = ($1, $2);
        return;
    }
    return if $line =~ /\A(?:profile|evaluation): /;
    if ($line =~ /\Avalidation data: /) {
        my $form = qr/: sha256 ([0-9a-f]{64}), vocabulary of ($INTEGER) ids, ($INTEGER) tokens predicted\z/;
        $log->{validation} = {sha256 => $1, vocabulary => $2, tokens => $3} if $line =~ $form;
        return;
    }
    my ($step, $total, $loss, $time, $average);
    if ($line =~ m{\Astep:($INTEGER)/($INTEGER) val_loss:($LOSS) $TIMES\z}) {
        ($step, $total, $loss, $time, $average) = ($1, $2, $3, $4, $5);
    }
    elsif ($line =~ m{\Astep:($INTEGER)/($INTEGER) $TIMES\z}) {
        ($step, $total, $time, $average) = ($1, $2, $3, $4);
    }
    else {
        die "$where: not a line of a run's log: \"" . printable(substr $line, 0, 80) . "\"\n";
    }
    check_order($log, $where, $step, $total, $loss, $time);
    # train_time is rounded to whole ms, the average to 0.01 ms.
    my $steps = $step || 1;
    die "$where: step_avg:${average}ms is not train_time / step\n"
        if abs($average - $time / $steps) > 0.5 / $steps + 0.0051;
    $log->{total} = $total;
    if (defined $loss) { push @{$log->{validations}}, [$step, $loss, $time] }
    else { push @{$log->{steps}}, [$step, $time] }
}

sub check_order {
    my ($log, $where, $step, $total, $loss, $time) = @_;
    my ($validation, $training) = ($log->{validations}[-1], $log->{steps}[-1]);
    my $now =
        $training ? $training->[0] : $validation ? $validation->[0] : undef; # training steps done so far
    my $before = $training ? $training->[1] : 0;
    die "$where: $total steps in all, the lines before say $log->{total}\n"
        if defined $log->{total} && $log->{total} != $total;
    die "$where: step $step of $total\n" if $step > $total;
    die "$where: train_time falls from ${before} to ${time} ms\n" if $time < $before;
    if (defined $loss) {
        die "$where: validation of step $step after training step $now\n" if defined $now && $step != $now;
        die "$where: a second validation of step $step\n" if $validation && $validation->[0] == $step;
    }
    else {
        my $expected = defined $now ? $now + 1 : $step;
        die "$where: training step $step where $expected was expected\n" if $step != $expected || $step == 0;
    }
}

# What a parsed log lacks to be that of one complete run, or '' when it is complete.
sub unfinished {
    my ($log) = @_;
    return "it is the log of a resumed run ($log->{resumed}), not of a whole one" if $log->{resumed} ne '';
    return "it holds no step line" if !defined $log->{total};
    my ($first, $last) = @{$log->{validations}}[0, -1];
    my $began = $first && $first->[0] == 0;
    return
        "it does not begin with the validation of step 0; the log of a resumed run is not that of a whole one"
        if !$began;
    my $done = @{$log->{steps}} ? $log->{steps}[-1][0] : 0;
    return "it stops after training step $done of $log->{total}" if $done != $log->{total};
    return "the validation of the last step, $log->{total}, is missing" if $last->[0] != $log->{total};
    return "its last line, peak memory, is missing" if !defined $log->{allocated};
    return '';
}

# Text from outside (names, lines of files) for one line of a message or a page: letters of any language stay,
# control and invisible characters and bytes that are no UTF-8 are written as \n, \x1b, \x{202e}.
sub printable {
    my ($text) = @_;
    $text = "$text";
    if (!utf8::decode($text)) { $text =~ s/([^ -~])/escaped_character($1)/ge }
    $text =~ s/([\p{Cc}\p{Cf}\p{Cn}\p{Co}\p{Zl}\p{Zp}])/escaped_character($1)/ge;
    utf8::encode($text);
    return $text;
}

sub escaped_character {
    my ($character) = @_;
    my %short = ("\n" => '\n', "\t" => '\t', "\r" => '\r');
    my $code = ord $character;
    return $short{$character} // sprintf $code < 256 ? '\x%02x' : '\x{%x}', $code;
}

# What died, for "program: error: ...": one line whatever names are in it.
sub error_line {
    my ($error) = @_;
    return printable($error =~ s/\n+\z//r) . "\n";
}

# files($folder, $ending): the logs of the runs that wrote into an --out folder, oldest first:
# FOLDER/RUN/UUID.ENDING, where RUN was "logs" for older programs.
sub files {
    my ($folder, $ending) = @_;
    my $quoted = $folder =~ s/([\\\[\]{}*?~])/\\$1/gr;
    my %written = map { $_ => (stat)[9] } bsd_glob("$quoted/*/*.$ending");
    return sort { $written{$a} <=> $written{$b} || $a cmp $b } keys %written;
}

# Whether a text is a finite number that a plot or a mean can take.
sub is_number {
    my ($text) = @_;
    return
           defined $text
        && !ref $text
        && $text =~ /\A-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?\z/
        && abs($text) < 1e15;
}

1;
