# Reads the JSON lines of runs (llmc/io/logger.h), also of runs that still go on. A run is a hash:
#
#   path, label     as given; what a picture calls it
#   options         {name => value}, as the run wrote them
#   training, validation, times, mfu   {step => loss}, {step => loss}, {step => ms}, {step => share of the peak}
#   dropped         {the same keys => [step, ...]}: values that are no finite numbers, as a diverged run has them
#   last            the last event with a training loss; undef before the first
#   end             'ended', or how the run failed; undef while it goes on, and when it was killed
#   written         time of the last change of its files, seconds of the clock
package RunEvents;

use strict;
use warnings;
use Cwd qw(abs_path);
use File::Basename qw(basename dirname);
use JSON::PP ();
use RunLog;
use Time::HiRes ();

my %KEY = (training => 'loss', validation => 'val_loss', times => 'ms', mfu => 'mfu');
my %WHAT = (training => 'training losses', validation => 'validation losses', times => 'step times');

# ---- files -------------------------------------------------------------------------------------------------

# The .jsonl files of a run's folder: the run's first, then those of the processes that went on from its
# checkpoints, in the order in which they were written last.
sub files_of {
    my ($folder) = @_;
    opendir my $dir, $folder or die "$folder: cannot be read: $!\n";
    my @files = map {"$folder/$_"} grep {/\.jsonl\z/} readdir $dir;
    my %written = map { $_ => (Time::HiRes::stat $_)[9] // 0 } @files;
    @files = sort { $written{$a} <=> $written{$b} || $a cmp $b } @files;
    return @files;
}

# The runs' folders that are meant: the one given, also when it has just been made, or those in it, the newest last.
sub folders {
    my ($given) = @_;
    return $given if files_of($given) || basename($given) =~ /\A[0-9]{4}-[0-9]{2}-[0-9]{2}_.*_[0-9a-f]{8}\z/s;
    opendir my $dir, $given or die "$given: cannot be read: $!\n";
    my @runs = grep { -d && -r _ && files_of($_) } map {"$given/$_"} grep { !/\A\./ } readdir $dir;
    die "$given: no run: no .jsonl file in it or in a folder in it; name the folder that holds the run, like runs/quickstart\n"
        if !@runs;
    my %written = map { $_ => (Time::HiRes::stat((files_of($_))[-1]))[9] } @runs;
    @runs = sort { $written{$a} <=> $written{$b} || $a cmp $b } @runs;
    return @runs;
}

# What names a file or folder of a run: its name, but for a file that is called by a uuid that of its folder.
sub label {
    my ($path) = @_;
    my $name = basename($path);
    my $uuid = $name =~ /\A[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\.(?:jsonl|txt)\z/;
    return $name if !$uuid && $name !~ /\A(?:\.\.?|\/)\z/;
    return basename($uuid ? dirname(abs_path($path)) : abs_path($path));
}

# Of several: names that are the same get their number.
sub labels {
    my @labels = map { label($_) } @_;
    my (%count, %seen);
    $count{$_}++ for @labels;
    return map { $count{$_} > 1 ? "$_ (" . ++$seen{$_} . ')' : $_ } @labels;
}

# ---- runs --------------------------------------------------------------------------------------------------

sub empty {
    my ($path) = @_;
    return {path => $path, label => label($path), options => {}, map { $_ => {} } keys %KEY, 'dropped'};
}

# A run's folder, a folder of runs (the newest one), or one .jsonl file. Nothing is read yet. Dies with one line.
sub open_run {
    my ($given) = @_;
    die "$given: no such file or folder\n" if !-e $given;
    my $path = -d _ ? (folders($given))[-1] : $given;
    die "$given: not a run: give its folder or its .jsonl file\n" if -f $path && $path !~ /\.jsonl\z/;
    my $run = empty($path);
    $run->{reading} = {}; # file => {offset, number}: of its lines that have been read
    return $run;
}

# Reads what was written since the last call. Returns whether there was anything. A line waits until it is
# whole.
sub follow {
    my ($run) = @_;
    my $news = 0;
    for my $path (-d $run->{path} ? files_of($run->{path}) : $run->{path}) {
        my $file = $run->{reading}{$path} //= {offset => 0, number => 0};
        my $in = RunLog::open_file($path);
        my ($size, $written) = (Time::HiRes::stat $in)[7, 9];
        die "$path: was cut while it was read\n" if $size < $file->{offset};
        $run->{written} = $written;
        next if $size == $file->{offset};
        seek $in, $file->{offset}, 0 or die "$path: cannot be read: $!\n";
        my $bytes = do { local $/; <$in> } // die "$path: cannot be read: $!\n";
        my $whole = 1 + rindex $bytes, "\n";
        $file->{offset} += $whole;
        for my $line (split /\n/, substr $bytes, 0, $whole) {
            $file->{number}++;
            add_event($run, event($line) // die "$path: line $file->{number}: not JSON\n");
        }
        $news ||= $whole;
    }
    return $news;
}

# A run as it is now, from a folder or a .jsonl file.
sub read_run {
    my ($path) = @_;
    my $run = open_run($path);
    follow($run);
    return $run;
}

# ---- events ------------------------------------------------------------------------------------------------

my $NUMBER = qr/null|-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{1,3})?/;

# The hash of a line; undef for one that is no JSON object. Nearly all lines are steps, which hold numbers only:
# they are taken apart here, ten times as fast as by the library.
sub event {
    my ($line) = @_;
    if ($line =~ /\A\{(?:"event":"([a-z]+)",)?("[a-z_]+":$NUMBER(?:,"[a-z_]+":$NUMBER)*)\}\z/) {
        my ($kind, $numbers) = ($1, $2);
        my %event = $numbers =~ /"([a-z_]+)":($NUMBER)/g;
        return {event => $kind, map { $_ => $event{$_} eq 'null' ? undef : $event{$_} } keys %event};
    }
    my $event = eval { JSON::PP::decode_json($line) };
    return ref $event eq 'HASH' ? $event : undef;
}

sub add_event {
    my ($run, $event) = @_;
    my $kind = $event->{event} // '';
    my $step = $event->{step};
    if ($kind eq 'options') { begin($run, $event) }
    if ($kind eq 'end') { $run->{end} //= 'ended' }
    if ($kind eq 'failure') { $run->{end} = ref $event->{text} ? 'failed' : $event->{text} // 'failed' }
    return if !defined $step || ref $step || $step !~ /\A[0-9]{1,12}\z/;
    $run->{last} = $event if exists $event->{loss};
    for (keys %KEY) { add_point($run, $_, $step, $event->{$KEY{$_}}) if exists $event->{$KEY{$_}} }
}

# A process begins with its options. One that goes on from a checkpoint takes the steps after it again.
sub begin {
    my ($run, $event) = @_;
    $run->{options} = $event->{options} if ref $event->{options} eq 'HASH';
    delete @$run{qw(end last)};
    return if ($event->{resumed} // '') !~ /\Afrom step ([0-9]{1,12}),/;
    my $done = $1;
    for my $what (keys %KEY) {
        delete @{$run->{$what}}{grep { $_ > $done } keys %{$run->{$what}}};
        my @dropped = grep { $_ <= $done } @{$run->{dropped}{$what} // []};
        if (@dropped) { $run->{dropped}{$what} = \@dropped }
        else { delete $run->{dropped}{$what} }
    }
}

# A diverged run has losses that are no numbers. They cannot be compared or drawn; who does says how many there
# are. The first step of a process has no time where its beginning is not known: that of a resumed run.
sub add_point {
    my ($run, $what, $step, $value) = @_;
    return if $what eq 'times' && !defined $value;
    if (RunLog::is_number($value)) { $run->{$what}{$step + 0} = $value + 0 }
    else { push @{$run->{dropped}{$what}}, $step + 0 }
}

# What of a run is left out, a sentence each.
sub dropped {
    my ($run) = @_;
    return map {
        my @steps = sort { $a <=> $b } @{$run->{dropped}{$_}};
        sprintf '%d of %d %s are no finite numbers (the first at step %d) and are left out', scalar @steps,
            @steps + keys %{$run->{$_}}, $WHAT{$_}, $steps[0];
    } grep { $WHAT{$_} } sort keys %{$run->{dropped}};
}

# How many steps the run is to take by its options; undef when they do not say.
sub total_steps {
    my ($run) = @_;
    my ($stop, @parts) = @{$run->{options}}{qw(stop-at num-scheduled num-extension)};
    return if grep { !defined || ref || !/\A[0-9]{1,10}\z/ } @parts;
    return RunLog::is_number($stop) && $stop > 0 ? $stop : $parts[0] + $parts[1];
}

1;
