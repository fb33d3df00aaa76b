# Line plots as SVG for HTML pages that need nothing else: no script and no network. A page that has them takes
# the colours of its reader's system, light or dark, and shows the values below the pointer.
package SvgPlot;

use strict;
use warnings;
use Exporter qw(import);
use RunLog;
use RunStats ();

our @EXPORT_OK = qw(escaped plot ticks);

# Of a page with plots: classes "a" and "b" are the colours of two sets, "d" that of their difference.
our $STYLE = <<'END_OF_STYLE';
:root{color-scheme:light dark;--back:#fff;--text:#222;--quiet:#666;--line:#ddd;--a:#1565c0;--b:#d84315;--d:#444}
@media(prefers-color-scheme:dark){
:root{--back:#17191c;--text:#ddd;--quiet:#999;--line:#3a3d42;--a:#64b5f6;--b:#ff8a65;--d:#bbb}}
body{background:var(--back);color:var(--text)}
svg{width:100%;font:12px sans-serif}
svg text{fill:var(--text)}
.a{color:var(--a)}.b{color:var(--b)}.d{color:var(--d)}
polyline{fill:none;stroke:currentColor}polygon{fill:currentColor;opacity:.15}circle{fill:currentColor}
.grid{stroke:var(--line)}.y,.value{text-anchor:end}.x{text-anchor:middle}.title{font-weight:bold}
.at rect{fill:none;pointer-events:all}.at line{stroke:var(--quiet);stroke-dasharray:2 2}
.at line,.at text{visibility:hidden}.at:hover line,.at:hover text{visibility:visible}
END_OF_STYLE

# Text from outside, for a page.
sub escaped {
    my ($text) = @_;
    my %entity = ('&' => '&amp;', '<' => '&lt;', '>' => '&gt;', '"' => '&quot;', "'" => '&#39;');
    return RunLog::printable($text) =~ s/([&<>"'])/$entity{$1}/gr;
}

# About five round numbers between two values.
sub ticks {
    my ($low, $high) = @_;
    return ($low) if $high - $low <= 1e-12 * (abs($low) + abs $high); # no numbers between them
    my $step = 10**int(log(($high - $low) / 5) / log(10) - ($high - $low < 5 ? 1 : 0));
    for (1, 2, 5, 10, 20, 50) {
        if (($high - $low) / ($step * $_) <= 7) { $step *= $_; last }
    }
    my @ticks;
    for (my $i = int($low / $step) - 1; $i * $step <= $high; $i++) {
        push @ticks, $i * $step if $i * $step >= $low;
    }
    return @ticks;
}

my ($WIDTH, $HEIGHT, $LEFT, $RIGHT, $BOTTOM, $TOP) = (860, 360, 70, 20, 40, 30);

# curves: [{name, class, width, points => [[x, y], ...], band => [[x, low, high], ...]}, ...]; below the pointer is
# the mean of all curves of a name. Returns '' where there is nothing to draw.
sub plot {
    my ($title, $unit, @curves) = @_;
    my @x = sort { $a <=> $b } map { $_->[0] } map { @{$_->{points}} } @curves;
    my @y = sort { $a <=> $b } map {
        my $c = $_;
        (map { $_->[1] } @{$c->{points}}), map { @$_[1, 2] } @{$c->{band} // []}
    } @curves;
    return '' if !@y;
    my ($x0, $x1, $y0, $y1) = ($x[0], $x[-1], $y[0], $y[-1]);
    $x1 = $x0 + 1 if $x1 <= $x0;
    if ($y1 <= $y0) { $y0 -= 0.5; $y1 += 0.5 }
    my $margin = 0.05 * ($y1 - $y0);
    ($y0, $y1) = ($y0 - $margin, $y1 + $margin);
    my $px = sub { sprintf '%.1f', $LEFT + ($_[0] - $x0) / ($x1 - $x0) * ($WIDTH - $LEFT - $RIGHT) };
    my $py = sub { sprintf '%.1f', $HEIGHT - $BOTTOM - ($_[0] - $y0) / ($y1 - $y0) * ($HEIGHT - $BOTTOM - $TOP) };
    my $svg =
          qq{<svg viewBox="0 0 $WIDTH $HEIGHT" role="img"><text x="$LEFT" y="18" class="title">}
        . escaped($title)
        . "</text>\n";
    for (ticks($y0, $y1)) {
        my $at = $py->($_);
        $svg .= sprintf qq{<line x1="%d" x2="%d" y1="%s" y2="%s" class="grid"/>}, $LEFT, $WIDTH - $RIGHT, $at, $at;
        $svg .= sprintf qq{<text x="%d" y="%.1f" class="y">%.6g</text>\n}, $LEFT - 6, $at + 4, $_;
    }
    $svg .= sprintf qq{<text x="%s" y="%d" class="x">%.6g</text>\n}, $px->($_), $HEIGHT - 20, $_
        for ticks($x0, $x1);
    $svg .= sprintf qq{<text x="%d" y="%d" class="x">step</text><text x="8" y="18">%s</text>\n}, $WIDTH / 2,
        $HEIGHT - 4, escaped($unit);
    return $svg . join('', map { drawn($_, $px, $py) } @curves) . values_at($px, @curves) . "</svg>\n";
}

# A curve, with its points where they are few.
sub drawn {
    my ($curve, $px, $py) = @_;
    my $svg = qq{<g class="$curve->{class}">};
    if (my $band = $curve->{band}) {
        my @edge = (
            (map { $px->($_->[0]) . ',' . $py->($_->[1]) } @$band),
            reverse map { $px->($_->[0]) . ',' . $py->($_->[2]) } @$band);
        $svg .= qq{<polygon points="@edge"/>\n};
    }
    my @points = map { $px->($_->[0]) . ',' . $py->($_->[1]) } @{$curve->{points}};
    $svg .= qq{<polyline points="@points" stroke-width="$curve->{width}"/>\n};
    if (@points <= 60) { $svg .= sprintf qq{<circle cx="%s" cy="%s" r="2.5"/>}, split /,/ for @points }
    return "$svg</g>\n";
}

# What shows below the pointer: a line at each of at most 120 places, and the values there.
sub values_at {
    my ($px, @curves) = @_;
    my (%at, %seen);
    for my $curve (@curves) { push @{$at{$_->[0]}{$curve->{name}}}, $_->[1] for @{$curve->{points}} }
    my @names = grep { !$seen{$_}++ } map { $_->{name} } @curves;
    my @x = sort { $a <=> $b } keys %at;
    @x = map { $x[int($_ * $#x / 119)] } 0 .. 119 if @x > 120;
    my $svg = '';
    for my $i (0 .. $#x) {
        my @here = grep { $at{$x[$i]}{$_} } @names;
        my $text = "step $x[$i]: " . join ', ', map {
            my $values = $at{$x[$i]}{$_};
            sprintf '%s %.6g', $_, RunStats::mean(@$values)
        } @here;
        my ($from, $to) = map { $px->(($x[$i] + $x[$_]) / 2) } $i ? $i - 1 : 0, $i < $#x ? $i + 1 : $#x;
        ($from, $to) = ($from - 3, $to + 3) if $to - $from < 1;
        $svg .= sprintf qq{<g class="at"><rect x="%.1f" y="%d" width="%.1f" height="%d"/>}, $from, $TOP, $to - $from,
            $HEIGHT - $TOP - $BOTTOM;
        $svg .= sprintf qq{<line x1="%s" x2="%s" y1="%d" y2="%d"/>}, ($px->($x[$i])) x 2, $TOP, $HEIGHT - $BOTTOM;
        $svg .= sprintf qq{<text x="%d" y="18" class="value">%s</text></g>\n}, $WIDTH - $RIGHT, escaped($text);
    }
    return $svg;
}

1;
