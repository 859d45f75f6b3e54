//! `loss.svg`: the losses of a run over its steps, as a picture that any browser shows.
//!
//! Training loss is drawn twice, as it is (light) and smoothed (dark); validation loss is dots. Both axes
//! have round ticks. The text is built by hand: a chart of two curves needs no library.

use std::fmt::Write;
use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::log::Metrics;
use crate::checkpoint::atomic_write;
use crate::error::Result;

/// Size of the picture.
const SIZE: (f64, f64) = (800.0, 450.0);
/// Where the curves are, from left to right and from top to bottom.
const AREA: (Range<f64>, Range<f64>) = (68.0..764.0, 64.0..396.0);
/// Intervals between ticks that an axis has at most; their size is rounded up, to 2.5 times at most.
const TICKS: f64 = 8.0;
/// The smoothed curve averages over this share of all points on either side.
const SMOOTHING: f64 = 1.0 / 80.0;

const RAW: &str = "#b5cdeb";
const SMOOTH: &str = "#1f5aa6";
const VALID: &str = "#d1495b";
const INK: &str = "#30343a";
const FAINT: &str = "#6b717a";
const GRID: &str = "#e4e7eb";

/// How an axis counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scale {
    /// By differences.
    Linear,
    /// By ratios, which shows late progress as well as early one. Losses that are not above 0 are left out.
    #[default]
    Log,
}

/// Draws the losses of a run: an SVG file of 800 by 450 on a light ground.
///
/// Values that are not finite are left out. The text is the same for the same metrics.
///
/// ```
/// use boostr::train::{Metrics, Scale, loss_svg};
///
/// let line = |step, loss| Metrics { step, loss, ..Metrics::default() };
/// let svg = loss_svg("runs/a", &[line(1, 6.9), line(2, 5.2), line(3, 4.8)], Scale::Linear);
/// assert!(svg.starts_with("<svg ") && svg.contains("runs/a"));
/// ```
#[must_use]
pub fn loss_svg(title: &str, metrics: &[Metrics], scale: Scale) -> String {
    let train = points(metrics, scale, |line| Some(line.loss));
    let valid = points(metrics, scale, |line| line.valid_loss);
    let mut svg = Svg::new(title);
    let losses = || train.iter().chain(&valid).map(|point| point.1);
    let low = losses().fold(f64::INFINITY, f64::min);
    let high = losses().fold(f64::NEG_INFINITY, f64::max);
    if low > high {
        svg.text((SIZE.0 / 2.0, SIZE.1 / 2.0), "middle", 14, FAINT, "no step has been logged yet");
        return svg.end();
    }
    let last = train.iter().chain(&valid).map(|point| point.0).fold(1.0, f64::max);
    let x = Axis::steps(last);
    let y = match scale {
        Scale::Linear => Axis::linear(low, high),
        Scale::Log => Axis::log(low, high),
    };
    svg.axes(&x, &y, scale);

    let place = |&(step, loss): &(f64, f64)| {
        let (across, down) = AREA;
        let left = across.start + x.place(step) * (across.end - across.start);
        (left, down.end - y.place(loss) * (down.end - down.start))
    };
    let raw: Vec<(f64, f64)> = train.iter().map(place).collect();
    svg.curve(&raw, RAW, 1.0);
    let smooth: Vec<(f64, f64)> = smoothed(&train).iter().map(place).collect();
    svg.curve(&smooth, SMOOTH, 2.2);
    let dots: Vec<(f64, f64)> = valid.iter().map(place).collect();
    svg.curve(&dots, VALID, 1.2);
    svg.dots(&dots, VALID);

    let mut legend = vec![("training", RAW), ("smoothed", SMOOTH)];
    legend.extend((!valid.is_empty()).then_some(("validation", VALID)));
    svg.legend(&legend);
    svg.summary(last, smoothed(&train).last(), valid.last());
    svg.end()
}

/// Writes [`loss_svg`] to a file, as a whole or not at all.
///
/// # Errors
///
/// [`Error::Io`](crate::Error::Io) as [`atomic_write`].
pub fn write_loss_svg(path: &Path, title: &str, metrics: &[Metrics], scale: Scale) -> Result<()> {
    let svg = loss_svg(title, metrics, scale);
    atomic_write(path, |out| out.write_all(svg.as_bytes()))
}

/// Step and loss of the lines that have one which can be drawn.
fn points(
    metrics: &[Metrics],
    scale: Scale,
    loss: impl Fn(&Metrics) -> Option<f64>,
) -> Vec<(f64, f64)> {
    let can_be_drawn = |loss: &f64| {
        let least =
            if scale == Scale::Log { f64::from(f32::MIN_POSITIVE) } else { f64::from(f32::MIN) };
        (least..=f64::from(f32::MAX)).contains(loss)
    };
    let point = |line: &Metrics| Some((line.step as f64, loss(line).filter(can_be_drawn)?));
    metrics.iter().filter_map(point).collect()
}

/// Each loss as the mean over its neighbours, twice: over more of them as the run goes on, because losses
/// change fast at first. Where the later neighbours are missing, the straight line that fits the others best
/// goes on to the end. So a straight line stays as it is.
fn smoothed(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut points = points.to_vec();
    let count = points.len();
    let widest = (count as f64 * SMOOTHING).ceil() as usize;
    for _ in 0..2 {
        // Sums of the losses before each, and of their products with their places.
        let mut sums = vec![(0.0, 0.0)];
        for (i, (_, loss)) in points.iter().enumerate() {
            let (sum, products) = sums[i];
            sums.push((sum + loss, products + i as f64 * loss));
        }
        for (i, point) in points.iter_mut().enumerate() {
            let reach = widest.min(i.div_ceil(4));
            let (start, end) = (i - reach, (i + reach + 1).min(count));
            let n = (end - start) as f64;
            let mean = (sums[end].0 - sums[start].0) / n;
            let middle = (start + end - 1) as f64 / 2.0;
            let off = i as f64 - middle;
            point.1 = mean;
            if off > 0.0 {
                let products = sums[end].1 - sums[start].1 - middle * n * mean;
                point.1 += off * products * 12.0 / (n * (n * n - 1.0));
            }
        }
    }
    points
}

/// What an axis shows, and where it has ticks.
struct Axis {
    low: f64,
    high: f64,
    scale: Scale,
    /// Values with their labels.
    ticks: Vec<(f64, String)>,
}

impl Axis {
    /// From 0 to the last step, at least 1, with ticks at whole steps.
    fn steps(last: f64) -> Self {
        let each = round_step(last / TICKS).max(1.0);
        let ticks = (0..=(last / each) as u64).map(|k| k as f64 * each);
        let ticks = ticks.map(|step| (step, thousands(step as u64))).collect();
        Self { low: 0.0, high: last, scale: Scale::Linear, ticks }
    }

    /// From the tick at or below `low` to the one at or above `high`.
    fn linear(low: f64, high: f64) -> Self {
        let size = low.abs().max(high.abs());
        // A flat curve lies in the middle.
        let widen = if high - low > 1e-6 * size { 0.0 } else { 0.05 * size.max(1e-3) };
        let (low, high) = (low - widen, high + widen);
        let each = round_step((high - low) / TICKS);
        let (first, last) = ((low / each).floor() as i64, (high / each).ceil() as i64);
        let ticks: Vec<_> = (first..=last).map(|k| tick(k as f64 * each, each)).collect();
        Self { low: first as f64 * each, high: last as f64 * each, scale: Scale::Linear, ticks }
    }

    /// A little more than from `low` to `high`, both above 0, with ticks at 1, 2 and 5 of each
    /// decade. Too many of them become powers of ten, too few round differences.
    fn log(low: f64, high: f64) -> Self {
        let margin = (high / low).powf(0.04).max(1.02);
        let (low, high) = (low / margin, high * margin);
        let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
        let each = decades.clone().count().div_ceil(10);
        let fine = decades.clone().flat_map(|e| [1.0, 2.0, 5.0].map(|m| m * 10f64.powi(e)));
        let coarse = decades.step_by(each).map(|e| 10f64.powi(e));
        let inside = |values: Vec<f64>| -> Vec<(f64, String)> {
            let shown = values.into_iter().filter(|value| (low..=high).contains(value));
            shown.map(|value| tick(value, value)).collect()
        };
        let mut ticks = inside(fine.collect());
        if ticks.len() > 12 {
            ticks = inside(coarse.collect());
        } else if ticks.len() < 4 {
            ticks = Self::linear(low, high).ticks;
            ticks.retain(|(value, _)| (low..=high).contains(value));
        }
        Self { low, high, scale: Scale::Log, ticks }
    }

    /// Where a value lies: 0 at the low end, 1 at the high one.
    fn place(&self, value: f64) -> f64 {
        match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => (value / self.low).ln() / (self.high / self.low).ln(),
        }
    }
}

/// The smallest of 1, 2 and 5 times a power of ten that is not below `step`.
fn round_step(step: f64) -> f64 {
    let power = 10f64.powf(step.log10().floor());
    let factors = [1.0, 2.0, 5.0].map(|factor| factor * power);
    // Rounding of the logarithm must not cost a size.
    factors.into_iter().find(|round| round * (1.0 + 1e-9) >= step).unwrap_or(10.0 * power)
}

/// A tick at `value`, with as many digits as ticks so far apart need.
fn tick(value: f64, each: f64) -> (f64, String) {
    // Rounding of a logarithm must not add a digit.
    let power = |x: f64| (x.abs() * (1.0 + 1e-9)).log10().floor();
    let decimals = -power(each);
    let label = if value == 0.0 || (1e-4..1e6).contains(&value.abs()) {
        format!("{value:.*}", decimals.max(0.0) as usize)
    } else {
        format!("{value:.*e}", (power(value) + decimals).max(0.0) as usize)
    };
    (value, label)
}

/// A number with its digits in groups: `12,000`.
fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// The points of a curve that a picture shows: of those that share a column of pixels the first, the
/// lowest, the highest and the last.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut kept = Vec::new();
    for column in points.chunk_by(|a, b| a.0.floor() == b.0.floor()) {
        let by_height = |a: &usize, b: &usize| column[*a].1.total_cmp(&column[*b].1);
        let ends =
            [Some(0), (0..column.len()).min_by(by_height), (0..column.len()).max_by(by_height)];
        let mut shown: Vec<usize> = ends.into_iter().flatten().chain([column.len() - 1]).collect();
        shown.sort_unstable();
        shown.dedup();
        kept.extend(shown.into_iter().map(|i| column[i]));
    }
    kept
}

/// A picture that is being drawn.
struct Svg(String);

impl Svg {
    fn new(title: &str) -> Self {
        let (width, height) = SIZE;
        let mut svg = Self(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" role=\"img\" font-family=\"system-ui, Helvetica, Arial, \
             'DejaVu Sans', sans-serif\">\n<rect width=\"{width}\" height=\"{height}\" fill=\"#fdfdfd\"/>\n"
        ));
        let _ = writeln!(svg.0, "<title>{}</title>", escaped(title));
        let shown: String = title.chars().take(40).collect();
        svg.text((AREA.0.start, 26.0), "start", 16, INK, &shown);
        svg
    }

    fn text(&mut self, at: (f64, f64), anchor: &str, size: u32, color: &str, text: &str) {
        let (x, y) = at;
        let _ = writeln!(
            self.0,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\" fill=\"{color}\">{}</text>",
            escaped(text)
        );
    }

    fn line(&mut self, from: (f64, f64), to: (f64, f64), color: &str, width: f64) {
        let _ = writeln!(
            self.0,
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{color}\" stroke-width=\"{width}\"/>",
            from.0, from.1, to.0, to.1
        );
    }

    fn axes(&mut self, x: &Axis, y: &Axis, scale: Scale) {
        let (across, down) = AREA;
        for (value, label) in &y.ticks {
            let at = down.end - y.place(*value) * (down.end - down.start);
            self.line((across.start, at), (across.end, at), GRID, 1.0);
            self.text((across.start - 8.0, at + 4.0), "end", 12, FAINT, label);
        }
        self.line((across.start, down.end), (across.end, down.end), FAINT, 1.0);
        for (value, label) in &x.ticks {
            let at = across.start + x.place(*value) * (across.end - across.start);
            self.line((at, down.end), (at, down.end + 5.0), FAINT, 1.0);
            self.text((at, down.end + 20.0), "middle", 12, FAINT, label);
        }
        let middle = f64::midpoint(across.start, across.end);
        self.text((middle, SIZE.1 - 12.0), "middle", 13, INK, "step");
        let name = match scale {
            Scale::Linear => "loss, nats per token",
            Scale::Log => "loss, nats per token (log)",
        };
        let middle = f64::midpoint(down.start, down.end);
        let _ = writeln!(
            self.0,
            "<text transform=\"translate(20 {middle:.1}) rotate(-90)\" text-anchor=\"middle\" font-size=\"13\" \
             fill=\"{INK}\">{name}</text>"
        );
    }

    fn curve(&mut self, points: &[(f64, f64)], color: &str, width: f64) {
        if points.len() < 2 {
            return self.dots(points, color);
        }
        self.0.push_str("<polyline points=\"");
        for (x, y) in thinned(points) {
            let _ = write!(self.0, "{x:.1},{y:.1} ");
        }
        let _ = writeln!(
            self.0,
            "\" fill=\"none\" stroke=\"{color}\" stroke-width=\"{width}\" stroke-linejoin=\"round\"/>"
        );
    }

    fn dots(&mut self, points: &[(f64, f64)], color: &str) {
        let radius = if points.len() > 60 { 1.5 } else { 3.0 };
        for (x, y) in thinned(points) {
            let _ = writeln!(
                self.0,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{color}\"/>"
            );
        }
    }

    /// What the colours mean, at the upper right, from right to left.
    fn legend(&mut self, entries: &[(&str, &str)]) {
        let mut right = SIZE.0 - 8.0;
        for (name, color) in entries.iter().rev() {
            // A little more than the letters take.
            let left = right - 8.5 * name.len() as f64 - 28.0;
            self.line((left, 22.0), (left + 20.0, 22.0), color, 3.0);
            self.text((left + 26.0, 26.0), "start", 13, INK, name);
            right = left - 12.0;
        }
    }

    /// The last values, under the title.
    fn summary(&mut self, step: f64, train: Option<&(f64, f64)>, valid: Option<&(f64, f64)>) {
        let mut text = format!("step {}", thousands(step as u64));
        for (name, value) in [("training", train), ("validation", valid)] {
            if let Some((_, loss)) = value {
                let _ = write!(text, ", {name} {loss:.3}");
            }
        }
        self.text((AREA.0.start, 46.0), "start", 12, FAINT, &text);
    }

    fn end(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }
}

/// A text as XML has it; characters that XML cannot have become spaces.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\0'..' ' | '\u{fffe}' | '\u{ffff}' => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(step: u64, loss: f64) -> Metrics {
        Metrics { step, loss, ..Metrics::default() }
    }

    /// A loss as runs have it, with noise, and validation at every tenth.
    fn run(steps: u64) -> Vec<Metrics> {
        (1..=steps)
            .map(|step| {
                let clean = 1.3 + 5.6 * (-(step as f64) / 80.0).exp() + 4.0 / (step as f64).sqrt();
                let noise = ((step * 7919) % 101) as f64 / 101.0 - 0.5;
                let valid_loss = step.is_multiple_of(steps.div_ceil(10)).then_some(clean + 0.1);
                Metrics { valid_loss, ..line(step, clean + 0.4 * noise) }
            })
            .collect()
    }

    /// The numbers of all attributes called `name`.
    fn numbers(svg: &str, name: &str) -> Vec<f64> {
        let start = format!(" {name}=\"");
        let parts = svg.split(&start).skip(1);
        let values = parts.filter_map(|part| part.split('"').next());
        values.flat_map(|value| value.split([' ', ','])).filter_map(|n| n.parse().ok()).collect()
    }

    /// Checks what can be checked of any picture.
    fn check(svg: &str) {
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        let mut open = Vec::new();
        for tag in svg.split('<').skip(1) {
            let (tag, text) = tag.split_once('>').unwrap();
            assert!(!text.contains('>') && text.matches('&').count() <= text.matches(';').count());
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            match (tag.strip_prefix('/'), tag.ends_with('/')) {
                (Some(name), _) => assert_eq!(open.pop(), Some(name)),
                (None, false) => open.push(tag.split(' ').next().unwrap()),
                (None, true) => {}
            }
        }
        assert!(open.is_empty(), "{open:?} stay open");
        for name in ["x", "x1", "x2", "cx"] {
            assert!(numbers(svg, name).iter().all(|x| (0.0..=SIZE.0).contains(x)), "{name}");
        }
        for name in ["y", "y1", "y2", "cy"] {
            assert!(numbers(svg, name).iter().all(|y| (0.0..=SIZE.1).contains(y)), "{name}");
        }
        for point in numbers(svg, "points").chunks(2) {
            let (across, down) = AREA;
            assert!((across.start - 0.1..=across.end + 0.1).contains(&point[0]), "{point:?}");
            assert!((down.start - 0.1..=down.end + 0.1).contains(&point[1]), "{point:?}");
        }
    }

    #[test]
    fn pictures_of_all_sizes_stay_in_their_frame() {
        for steps in [1, 2, 3, 10, 99, 1000, 20_000] {
            for scale in [Scale::Linear, Scale::Log] {
                let svg = loss_svg("runs/a", &run(steps), scale);
                check(&svg);
                assert!(svg.contains("training") && svg.contains("validation"));
                assert!(svg.len() < 150_000, "{} bytes for {steps} steps", svg.len());
            }
        }
    }

    #[test]
    fn odd_losses_are_drawn_or_left_out() {
        for losses in [
            &[][..],
            &[f64::NAN, f64::INFINITY],
            &[0.0],
            &[2.5, 2.5, 2.5],
            &[-1.0, 0.0, 1.0],
            &[1e-30, 1e30],
            &[-1e300, 1.0, 1e300],
            &[1e-12, 2e-12],
            &[123_456_789.0, 123_456_790.0],
            &[f64::MIN_POSITIVE, 1.0],
        ] {
            for scale in [Scale::Linear, Scale::Log] {
                let metrics: Vec<_> = (1..).zip(losses).map(|(i, loss)| line(i, *loss)).collect();
                check(&loss_svg("x", &metrics, scale));
            }
        }
        assert!(loss_svg("x", &[], Scale::Log).contains("no step"));
    }

    #[test]
    fn a_title_is_text() {
        let svg = loss_svg("<script>\"a\" & 'b'</script>\u{1}", &run(5), Scale::Log);
        check(&svg);
        assert!(!svg.contains("<script") && svg.contains("&lt;script&gt;&quot;a&quot; &amp; 'b'"));
    }

    #[test]
    fn ticks_are_round() {
        let labels = |axis: Axis| axis.ticks.into_iter().map(|tick| tick.1).collect::<Vec<_>>();
        assert_eq!(labels(Axis::linear(1.32, 6.9)), ["1", "2", "3", "4", "5", "6", "7"]);
        assert_eq!(
            labels(Axis::linear(0.12, 0.31)),
            ["0.10", "0.15", "0.20", "0.25", "0.30", "0.35"]
        );
        assert_eq!(
            labels(Axis::linear(-30.0, 90.0)),
            ["-40", "-20", "0", "20", "40", "60", "80", "100"]
        );
        assert_eq!(
            labels(Axis::log(0.03, 9.0)),
            ["0.05", "0.1", "0.2", "0.5", "1", "2", "5", "10"]
        );
        assert_eq!(labels(Axis::log(1.4, 2.6)), ["1.4", "1.6", "1.8", "2.0", "2.2", "2.4", "2.6"]);
        assert_eq!(labels(Axis::steps(23_500.0)), ["0", "5,000", "10,000", "15,000", "20,000"]);
        assert_eq!(labels(Axis::steps(3.0)), ["0", "1", "2", "3"]);
        assert_eq!(labels(Axis::steps(1.0)), ["0", "1"]);
    }

    #[test]
    fn every_axis_has_some_ticks_and_not_too_many() {
        for i in 0..400 {
            let low = 10f64.powf(f64::from(i) / 40.0 - 5.0);
            for ratio in [1.0, 1.001, 1.3, 2.0, 7.0, 30.0, 1e3, 1e6, 1e12] {
                for axis in [Axis::linear(low, low * ratio), Axis::log(low, low * ratio)] {
                    let count = axis.ticks.len();
                    assert!(
                        (3..=14).contains(&count),
                        "{count} ticks for {low} to {}",
                        low * ratio
                    );
                    assert!(axis.ticks.is_sorted_by(|a, b| a.0 < b.0 && a.1 != b.1));
                    let places = axis.ticks.iter().map(|tick| axis.place(tick.0));
                    assert!(places.into_iter().all(|p| (-1e-9..=1.0 + 1e-9).contains(&p)));
                }
            }
        }
    }

    #[test]
    fn smoothing_keeps_lines_and_quiets_noise() {
        for count in [1, 2, 3, 10, 500] {
            let straight: Vec<(f64, f64)> =
                (0..count).map(|i| (f64::from(i), 3.0 - 0.25 * f64::from(i))).collect();
            for (a, b) in smoothed(&straight).iter().zip(&straight) {
                assert!(a.0 == b.0 && (a.1 - b.1).abs() < 1e-9, "{a:?} {b:?}");
            }
        }
        let noisy: Vec<(f64, f64)> =
            (0..800).map(|i| (f64::from(i), if i % 2 == 0 { 1.0 } else { -1.0 })).collect();
        let quiet = smoothed(&noisy);
        // A mean over 21 alternating values is at most 1/21, and over those means 1/441.
        assert!(quiet[100..780].iter().all(|point| point.1.abs() < 0.003));
        // The line that ends the curve stands on half as many.
        assert!(quiet[780..].iter().all(|point| point.1.abs() < 0.2));
    }

    #[test]
    fn thinning_keeps_what_can_be_seen() {
        let points: Vec<(f64, f64)> = (0..10_000)
            .map(|i| (f64::from(i) / 100.0, if i == 5050 { 99.0 } else { f64::from(i % 7) }))
            .collect();
        let kept = thinned(&points);
        assert!(kept.len() <= 4 * 100 && kept.contains(&(50.5, 99.0)));
        assert!(kept.is_sorted_by(|a, b| a.0 < b.0));
        assert_eq!((kept[0], kept[kept.len() - 1]), (points[0], points[9999]));
        let few = [(0.0, 1.0), (5.0, 2.0), (5.5, 3.0)];
        assert_eq!(thinned(&few), few);
    }

    #[test]
    fn digits_come_in_groups_of_three() {
        let numbers = [0, 999, 1000, 12_345, 1_234_567];
        assert_eq!(numbers.map(thousands), ["0", "999", "1,000", "12,345", "1,234,567"]);
    }
}
