# Means of runs, and whether their differences can be chance.
package RunStats;

use strict;
use warnings;
use Exporter qw(import);
use POSIX qw(lgamma);

our @EXPORT_OK = qw(mean mean_and_sd student_cdf p_text welch quantile);

# Regularised incomplete beta function I_x(a, b), a, b > 0, 0 <= x <= 1: the continued fraction of Abramowitz
# & Stegun 26.5.8, evaluated by Lentz's method, on the side of the symmetry I_x(a,b) = 1 - I_{1-x}(b,a) where
# it converges fast.
sub incomplete_beta {
    my ($x, $a, $b) = @_;
    return 0 if $x <= 0;
    return 1 if $x >= 1;
    return 1 - incomplete_beta(1 - $x, $b, $a) if $x > ($a + 1) / ($a + $b + 2);
    my $front = exp($a * log($x) + $b * log(1 - $x) + lgamma($a + $b) - lgamma($a) - lgamma($b)) / $a;
    my $tiny = 1e-300;
    my ($f, $c, $d) = (1, 1, 0);
    for my $i (0 .. 10000) {
        my $m = int($i / 2);
        my $numerator =
              $i == 0 ? 1
            : $i % 2 ? -($a + $m) * ($a + $b + $m) * $x / (($a + 2 * $m) * ($a + 2 * $m + 1))
            : $m * ($b - $m) * $x / (($a + 2 * $m - 1) * ($a + 2 * $m));
        $d = 1 + $numerator * $d;
        $d = $tiny if abs($d) < $tiny;
        $d = 1 / $d;
        $c = 1 + $numerator / $c;
        $c = $tiny if abs($c) < $tiny;
        $f *= $c * $d;
        return $front * ($f - 1) if abs($c * $d - 1) < 1e-15;
    }
    die "internal error: incomplete_beta($x, $a, $b) did not converge\n";
}

# P(T <= t) for Student's t with $dof degrees of freedom; the tail itself is computed, so that small p keep
# their digits.
sub student_cdf {
    my ($t, $dof) = @_;
    my $tail = 0.5 * incomplete_beta($dof / ($dof + $t * $t), $dof / 2, 0.5);
    return $t < 0 ? $tail : 1 - $tail;
}

sub mean { my $sum = 0; $sum += $_ / @_ for @_; return $sum }

# (mean, standard deviation with n - 1)
sub mean_and_sd {
    my @x = @_;
    my $mean = mean(@x);
    my $squares = 0;
    $squares += ($_ - $mean)**2 for @x;
    return ($mean, sqrt($squares / (@x - 1)));
}

sub p_text {
    my ($p) = @_;
    return 'undefined' if !defined $p;
    return sprintf $p >= 0.00005 ? '%.4f' : '%.1e', $p;
}

# Welch's t-test, two-sided: t = (B - A) / sqrt(a/n + b/m) with the variances a, b of the values, and
# (a/n + b/m)^2 / ((a/n)^2/(n-1) + (b/m)^2/(m-1)) degrees of freedom (Welch 1947).
# {n, m, a, b, difference, t, dof, p, half}: means a and b, two-sided p, half the width of the 95% interval of
# the difference. Without t, dof, p and half where nothing can be tested.
sub welch {
    my ($first, $second) = @_;
    my %r = (n => scalar @$first, m => scalar @$second, a => mean(@$first), b => mean(@$second));
    $r{difference} = $r{b} - $r{a};
    return \%r if $r{n} < 2 || $r{m} < 2;
    my ($u, $v) = map { (mean_and_sd(@$_))[1]**2 / @$_ } $first, $second;
    return \%r if $u + $v < 1e-18;
    $r{t} = $r{difference} / sqrt($u + $v);
    $r{dof} = ($u + $v)**2 / ($u**2 / ($r{n} - 1) + $v**2 / ($r{m} - 1));
    $r{p} = 2 * student_cdf(-abs $r{t}, $r{dof});
    $r{half} = quantile(0.975, $r{dof}) * sqrt($u + $v);
    return \%r;
}

sub quantile { # of Student's t, by bisection
    my ($p, $dof) = @_;
    my ($low, $high) = (0, 1e4);
    for (1 .. 80) {
        my $middle = ($low + $high) / 2;
        if (student_cdf($middle, $dof) < $p) { $low = $middle }
        else { $high = $middle }
    }
    return $low;
}

1;
