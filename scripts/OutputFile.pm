# Writes files whole, or not at all.
package OutputFile;

use strict;
use warnings;
use Cwd qw(abs_path);
use Exporter qw(import);

our @EXPORT_OK = qw(write_file);

# Until the bytes are on the disk, a file that is there already stays as it is; a link stays one. What is no
# file, as /dev/stdout, is written to at once. Dies with one line.
sub write_file {
    my ($path, $bytes) = @_;
    my $target = -l $path ? abs_path($path) // $path : $path;
    my $part = -e $target && !-f _ ? '' : "$target.part";
    open my $out, '>:raw', $part || $target or die "$path cannot be written: $!\n";
    my $why = print($out $bytes) ? '' : "$!";
    # Also after a print that failed: a handle that perl closes by itself gives a warning of its own.
    close $out or $why ||= "$!";
    return if $why eq '' && (!$part || rename $part, $target);
    $why ||= "$!";
    unlink $part if $part;
    die "$path cannot be written: $why\n";
}

1;
