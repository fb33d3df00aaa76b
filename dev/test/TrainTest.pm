# What the end-to-end tests of the trainer share: shards made on the fly, runs with a time limit, logs and safetensors files.
package TrainTest;
use strict;
use warnings;
use Cwd qw(abs_path);
use Exporter qw(import);
use File::Basename qw(dirname);
use File::Temp qw(tempdir);
use JSON::PP ();
use Test::More;
use Time::HiRes qw(sleep stat time);

our @EXPORT = qw($root $dir $trainer $exact @tiny @gpus write_shard slurp spew documents start finish run run_ok run_together refuses losses log_text
    tensors floats to_bf16 same_state distance val_losses newest checkpoint checkpoints logs mpirun have_mpi rewrite first_port wait_for_signal_set);

our $root = dirname(dirname(dirname(abs_path(__FILE__))));
our $dir = tempdir(CLEANUP => 1);
our $trainer = $ENV{TRAIN_GPT} // "$root/train_gpt_cpu";
our $exact = "$root/build/exact" . (($ENV{BUILD} // "") =~ m{/cpu(.*)} ? $1 : "") . "/train_gpt_cpu";
# The GPUs that are ours to use. One of them unless a test says otherwise: the program takes all that it sees.
our @gpus = defined $ENV{CUDA_VISIBLE_DEVICES} ? split(/,/, $ENV{CUDA_VISIBLE_DEVICES}) : map { /^GPU (\d+)/ } `nvidia-smi -L 2>/dev/null`;
$ENV{CUDA_VISIBLE_DEVICES} = $gpus[0] // $ENV{CUDA_VISIBLE_DEVICES} // 0;
# One thread unless a test says otherwise: these models are too small to gain from more.
$ENV{OMP_NUM_THREADS} = 1;

# A network of the full topology whose 20 steps take half a second. Windows change at steps 6, 11 and 16.
our @tiny = (qw(--preset tiny --model-dim 32 --num-heads 2 --mlp-dim 128 --micro-batch-tokens 64 --block-size 4 --num-scheduled 16
    --num-extension 4 --val-tokens 512 --val-every 5 --head bf16), '--train-files', "$dir/train_*.bin", '--val-files', "$dir/val.bin");

# ---- files -------------------------------------------------------------------------------------------------------------

sub spew { my ($path, $bytes) = @_; open my $f, '>:raw', $path or die "$path: $!"; print $f $bytes; close $f or die "$path: $!"; return $path }
sub slurp { my ($path) = @_; open my $f, '<:raw', $path or return ''; local $/; return scalar(<$f>) // '' }

# Byte documents of a small alphabet with a bias that a model can learn; the same on every machine.
sub documents {
    my ($tokens, $seed) = @_;
    my @ids;
    my $random = sub { $seed = ($seed * 1103515245 + 12345) % 2**31; int($seed / 65536) % $_[0] };
    while (@ids < $tokens) {
        push @ids, 256;
        my $last = 0;
        push @ids, 97 + ($last = $random->(4) ? ($last + 1) % 8 : $random->(8)) for 1 .. 5 + $random->(90);
    }
    return @ids[0 .. $tokens - 1];
}

# write_shard($name, ids...): a shard of the byte vocabulary in the test folder. Returns its path.
sub write_shard {
    my ($name, @ids) = @_;
    spew("$dir/$name", pack('l<256', 20240520, 1, scalar(@ids), 257, 257, (0) x 251) . pack('S<*', @ids));
    return "$dir/$name";
}

# ---- runs --------------------------------------------------------------------------------------------------------------

# start(command...): in the background, output to files. finish($run, $seconds) -> exit status ('signal N', or 'timeout' when
# it had to be ended), stdout, stderr.
my $runs = 0;

sub start {
    my @command = @_;
    my $out = "$dir/output" . ++$runs;
    defined(my $pid = fork) or die "fork: $!";
    if (!$pid) {
        setpgrp;
        @SIG{qw(INT HUP)} = ('DEFAULT') x 2; # whoever runs the tests, in the background or under nohup, may have them ignored
        open STDIN, '<', '/dev/null' or die;
        open STDOUT, '>', "$out.1" or die;
        open STDERR, '>', "$out.2" or die;
        exec { $command[0] } @command or exit 127;
    }
    return {pid => $pid, out => $out};
}

sub finish {
    my ($run, $seconds) = @_;
    my $end = time + ($seconds // 300);
    my $late;
    while (waitpid($run->{pid}, 1) == 0) { # WNOHANG
        if (time > $end && !$late++) { kill 'KILL', -$run->{pid} }
        sleep 0.005;
    }
    my $status = $late ? 'timeout' : $? & 127 ? 'signal ' . ($? & 127) : $? >> 8;
    return ($status, slurp("$run->{out}.1"), slurp("$run->{out}.2"));
}

sub run { return finish(start(@_)) }

# Waits until the process is perl no more, and a signal, by its number, is in one of its sets: SigCgt, SigBlk (proc(5)).
sub wait_for_signal_set {
    my ($pid, $set, $number) = @_;
    my ($end, $perl) = (time + 60, readlink "/proc/$$/exe");
    while (time < $end) {
        last if (readlink("/proc/$pid/exe") // $perl) ne $perl && slurp("/proc/$pid/status") =~ /^$set:\s*(\S+)/m && hex(substr $1, -8) >> $number - 1 & 1;
        sleep 0.002;
    }
}

# The first of 40 ports, as child.h has them.
sub first_port { return 20000 + $$ % 300 * 40 }

sub run_ok {
    my ($what, @command) = @_;
    my ($status, $out, $err) = run(@command);
    ok($status eq '0', $what) or diag "status $status\n$out$err";
    return ($out, $err);
}

# run_together([what, command...], ...): all at once; each must end well. For GPUs, where starting takes longer than the run.
sub run_together {
    my @runs = map { my ($what, @command) = @$_; [$what, start(@command)] } @_;
    for (@runs) {
        my ($status, $out, $err) = finish($_->[1], 300);
        ok($status eq '0', $_->[0]) or diag "status $status\n$out$err";
    }
}

# Exit with this status and exactly one line on stderr, which matches.
sub refuses {
    my ($what, $status, $pattern, @command) = @_;
    my ($got, $out, $err) = run(@command);
    my @lines = split /\n/, $err;
    return ok($got eq $status && @lines == 1 && $err =~ $pattern, "$what: " . substr($lines[0] // 'no message', 0, 160))
        || diag "status $got, expected $status\n$err";
}

my $mpi_works;
sub have_mpi {
    return $mpi_works //= do {
        my ($status) = run(mpirun(2, 'true'));
        $status eq '0' ? 1 : 0;
    };
}
# A session folder for each mpirun: one that ends removes the folder that all share, and another one that is just starting then
# fails in orte_init with status 1 (Open MPI 4.1).
my $sessions = 0;
sub mpirun {
    my ($ranks, @command) = @_;
    return (qw(mpirun --allow-run-as-root --oversubscribe --bind-to none --mca orte_tmpdir_base), "$dir/mpi" . ++$sessions, '-np', $ranks, @command);
}

# ---- logs --------------------------------------------------------------------------------------------------------------

# Runs write into folders of their own below --out.
sub logs { my ($out, $ending) = @_; return glob "'$out'/????-??-??_*/*-*-*-*-*.$ending" }

# The newest log of the runs in a folder; ending: txt or jsonl.
sub log_text {
    my ($folder, $ending) = @_;
    my %written = map { $_ => (stat)[9] } logs($folder, $ending // 'txt');
    my ($path) = sort { $written{$b} <=> $written{$a} } keys %written;
    return $path ? slurp($path) : '';
}

# Training losses of all logs of a folder by step, as the text of 9 digits that names an fp32 uniquely; none where it is no number.
sub losses {
    my ($folder) = @_;
    my %loss;
    for (map { split /\n/, slurp($_) } logs($folder, 'jsonl')) { $loss{$1} = $2 if /"event":"step","step":(\d+),"loss":([-\d][^,]*)/ }
    return \%loss;
}

sub val_losses {
    my ($folder) = @_;
    my %loss;
    for (map { slurp($_) } logs($folder, 'txt')) { $loss{$1} = $2 while /^step:(\d+)\/\d+ val_loss:([0-9.]+) /mg }
    return \%loss;
}

# Checkpoints of the runs in a folder, by step; the last; and that of one step, which may be missing.
sub checkpoints { my ($out) = @_; return sort { ($a =~ /step_(\d+)/)[0] <=> ($b =~ /step_(\d+)/)[0] } glob "'$out'/????-??-??_*/step_*.safetensors" }
sub newest { return (checkpoints(@_))[-1] }
sub checkpoint { my ($out, $step) = @_; return (grep { /step_0*$step\.safe/ } checkpoints($out))[0] // "$out: no step $step" }

# ---- safetensors -------------------------------------------------------------------------------------------------------

# tensors($path) -> {name => {dtype, shape, bytes}}, {metadata}; dies for a file that is not well-formed.
sub tensors {
    my ($path) = @_;
    my $file = slurp($path);
    die "$path: too short\n" if length $file < 8;
    my $length = unpack 'Q<', $file;
    my $header = JSON::PP::decode_json(substr $file, 8, $length);
    my $metadata = delete $header->{__metadata__} // {};
    for my $tensor (values %$header) {
        my ($begin, $end) = @{$tensor->{data_offsets}};
        $tensor->{bytes} = substr $file, 8 + $length + $begin, $end - $begin;
        die "$path: truncated\n" if length $tensor->{bytes} != $end - $begin;
    }
    return ($header, $metadata);
}

sub floats {
    my ($tensor) = @_;
    return [unpack 'f<*', $tensor->{bytes}] if $tensor->{dtype} eq 'F32';
    return [unpack 'f<*', pack '(vv)*', map { (0, $_) } unpack 'v*', $tensor->{bytes}]; # BF16: the upper half of an fp32
}

# fp32 values to the bytes of bf16, to nearest even.
sub to_bf16 { return pack 'v*', map { ($_ + 0x7fff + ($_ >> 16 & 1)) >> 16 } unpack 'V*', pack 'f<*', @_ }

# rewrite($from, $to, sub { my ($name, $tensor) = @_; ... }): a copy of a safetensors file whose tensors the function changed or
# replaced; a tensor it returns false for is left out. Checksums are left out too: the copy is of the format
# that had none. Behind them come more tensors, name => {dtype, shape, bytes}.
sub rewrite {
    my ($from, $to, $change, %more) = @_;
    my ($tensors, $metadata) = tensors($from);
    my ($at, %header, $data) = (0);
    for my $name (sort { $tensors->{$a}{data_offsets}[0] <=> $tensors->{$b}{data_offsets}[0] } keys %$tensors) {
        my $tensor = $tensors->{$name};
        next if !$change->($name, $tensor, $metadata);
        my $end = $at + length $tensor->{bytes};
        $header{$name} = {dtype => $tensor->{dtype}, shape => $tensor->{shape}, data_offsets => [$at, $end]};
        $data .= $tensor->{bytes};
        $at = $end;
    }
    for my $name (sort keys %more) {
        my $end = $at + length $more{$name}{bytes};
        $header{$name} = {dtype => $more{$name}{dtype}, shape => $more{$name}{shape}, data_offsets => [$at, $end]};
        $data .= $more{$name}{bytes};
        $at = $end;
    }
    delete @$metadata{grep { /^crc32c/ } keys %$metadata};
    $metadata->{format} =~ s/ 2$/ 1/ if defined $metadata->{format};
    my $json = JSON::PP->new->canonical->encode({%header, __metadata__ => $metadata});
    $json .= ' ' x (-length($json) % 8);
    spew($to, pack('Q<', length $json) . $json . $data);
    return $to;
}

# What differs between two checkpoints, '' when nothing does: every tensor's bytes and all metadata but the clock, the number of
# ranks, and the options that say where to write and where to start.
sub same_state {
    my ($one, $other) = @_;
    my ($a, $meta_a) = tensors($one);
    my ($b, $meta_b) = tensors($other);
    delete @$_{qw(train_ms ranks option.out option.resume option.stop-at option.checkpoint-every option.threads option.save-init option.init-from
        option.val-every option.keep-checkpoints option.gpus option.ranks option.device option.timeout option.graphs option.config
        option.stop-after)}
        for $meta_a, $meta_b;
    delete @$_{grep { /^crc32c/ } keys %$_} for $meta_a, $meta_b; # they follow from the rest
    my @different = grep { !$a->{$_} || !$b->{$_} || $a->{$_}{bytes} ne $b->{$_}{bytes} } sort keys %{{%$a, %$b}};
    push @different, grep { ($meta_a->{$_} // '') ne ($meta_b->{$_} // '') } sort keys %{{%$meta_a, %$meta_b}};
    return join ' ', @different;
}

# |a - b| / |a|, Frobenius norms.
sub distance {
    my ($a, $b) = @_;
    return 'inf' if @$a != @$b;
    my ($difference, $norm) = (0, 0);
    for my $i (0 .. $#$a) {
        $difference += ($a->[$i] - $b->[$i])**2;
        $norm += $a->[$i]**2;
    }
    return $norm ? sqrt($difference / $norm) : $difference ? 'inf' : 0;
}

1;
