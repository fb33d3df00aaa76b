# Made-up evaluation files, and made-up weights for a network whose tensors a file names. The PyTorch reference makes the same
# weights by itself (dev/reference/make_golden_evaluation.py), and reads the files that this program writes:
#   perl dev/test/EvalMaterial.pm FOLDER     hellaswag.jsonl, lambada.jsonl, text.txt
package EvalMaterial;
use strict;
use warnings;
use Exporter qw(import);
use JSON::PP ();

our @EXPORT_OK = qw(write_items made_up);

my $json = JSON::PP->new->canonical->ascii;
my $seed;

sub random { my ($below) = @_; $seed = ($seed * 1103515245 + 12345) % 2**31; return int($seed / 65536) % $below }
sub word { return join '', map { chr(97 + random(8)) } 1 .. 1 + random(5) }
sub words { my ($count) = @_; return join ' ', map { word() } 1 .. $count }

sub spew { my ($path, @lines) = @_; open my $f, '>:raw', $path or die "$path: $!"; print $f @lines; close $f or die "$path: $!" }

# 200 items of HellaSwag's form, 60 of LAMBADA's, and a text.
sub write_items {
    my ($folder) = @_;
    $seed = 1;
    my @hellaswag = map {
        {ind => $_, activity_label => word(), ctx => words(2 + random(5)), endings => [map { words(1 + random(4)) } 0 .. 3],
            split => 'val', label => random(4)}
    } 0 .. 199;
    $hellaswag[7]{ctx} = "caf\x{e9} \"a\\b\"\t\x{1F600}";
    spew("$folder/hellaswag.jsonl", map { $json->encode($_) . "\n" } @hellaswag);
    spew("$folder/lambada.jsonl", map { $json->encode({text => words(4 + random(8))}) . "\n" } 1 .. 60);
    spew("$folder/text.txt", map { words(8) . "\n" } 1 .. 60);
}

# A tensor's values: multiples of 2^-7 below 1, or of 2^-9 below 1/4 for the matrices of the layers; bf16 holds
# them. Signs are +-1.
sub made_up {
    my ($name, $count) = @_;
    my $state = 7;
    $state = ($state * 31 + $_) % 2**31 for unpack 'C*', $name;
    my $scale = $name =~ /sign/ ? 0 : $name =~ /embed|head|scalars|lambdas|scale|b2/ ? 2**-7 : 2**-9;
    return map {
        $state = ($state * 1103515245 + 12345) % 2**31;
        $scale ? (($state >> 16) % 255 - 127) * $scale : $state >> 16 & 1 ? 1 : -1
    } 1 .. $count;
}

write_items($ARGV[0]) if !caller;
1;
