#!/usr/bin/env perl
# transform.pl FROM TO: a CUDA file as a host compiler with language.h in front takes it. Launches become calls, dynamic shared memory a
# pointer; instructions become an error of the run: those that are emulated are in llmc/cuda/sm80/sm80.cuh alone.
use strict;
use warnings;

my ($from, $to) = @ARGV;
open my $in, '<', $from or die "transform: $from: $!\n";
local $_ = do { local $/; <$in> };

my $nested;
$nested = qr/\((?:[^()"]|"(?:[^"\\]|\\.)*"|(??{$nested}))*\)/;
s/\basm\s*(?:volatile\s*)?$nested/emulate::no_instruction()/g;
s/extern\s+__shared__\s+(?:__align__\(\d+\)\s*)?(\w+(?:\s+char)?)\s+(\w+)\[\];/$1 *$2 = ($1 *)emulate::dynamic_shared();/g;
# The kernel's name may have arguments of a template, on the line before, too.
my ($template, $index);
$index = qr/\[(?:[^\[\]]|(??{$index}))*\]/;
$template = qr/<(?:[^<>]|(??{$template}))*>/;
s/((?:\b\w+(?:$index)*(?:::|\.))*\b[A-Za-z_]\w*)((?:$index|$template)*)\s*<<<(.*?)>>>(?=\s*\()/emulate::launch("$1", $1$2, $3)/gs;
s/__shared__ alignas(\(\d+\))/alignas$1 __shared__/g;
open my $out, '>', $to or die "transform: $to: $!\n";
print $out qq(#line 1 "$from"\n), $_;
close $out or die "transform: $to: $!\n";
