# Writes files whole, or not at all.
package OutputFile;

use strict;
use warnings;
use Exporter qw(import);

our @EXPORT_OK = qw(write_file);

# Until the bytes are on the disk, a file that is there already stays as it is. Dies with one line.
sub write_file {
    my ($path, $bytes) = @_;
    open my $out, '>:raw', "$path.part" or die "$path cannot be written: $!\n";
    my $why = print($out $bytes) ? '' : "$!";
    # Also after a print that failed: a handle that perl closes by itself gives a warning of its own.
    close $out or $why ||= "$!";
    return if $why eq '' && rename "$path.part", $path;
    $why ||= "$!";
    unlink "$path.part";
    die "$path cannot be written: $why\n";
}

1;
