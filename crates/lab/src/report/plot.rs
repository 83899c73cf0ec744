//! The plot of a curve: its frame, its two scales, and rectangles that keep apart.

/// The whole picture.
pub(super) const WIDTH: f64 = 880.0;
pub(super) const HEIGHT: f64 = 340.0;
/// The plot: left, right, top and bottom.
pub(super) const LEFT: f64 = 72.0;
pub(super) const RIGHT: f64 = WIDTH - 8.0;
pub(super) const TOP: f64 = 26.0;
pub(super) const BOTTOM: f64 = HEIGHT - 48.0;
/// How wide either edge is.
pub(super) const EDGE: f64 = 150.0;
/// What a label takes: a letter's width, a line's height.
pub(super) const LETTER: f64 = 7.6;
pub(super) const LINE: f64 = 15.0;

/// The scale of the log axis, in whole decades.
pub(super) struct Decades {
    pub(super) first: f64,
    pub(super) last: f64,
}

impl Decades {
    /// Decades that hold all of these logarithms.
    pub(super) fn of(logs: &[f64]) -> Decades {
        let all = || logs.iter().copied();
        // Without any, the axis still shows its scale.
        let [first, last] = match logs {
            [] => [0.0, 3.0],
            _ => [all().fold(f64::MAX, f64::min).floor(), all().fold(f64::MIN, f64::max).ceil()],
        };
        Decades { first, last: last.max(first + 1.0) }
    }

    /// Where a logarithm is.
    pub(super) fn x(&self, log: f64) -> f64 {
        // A little within, so that nothing is on an edge's border.
        let (from, to) = (LEFT + EDGE + 12.0, RIGHT - EDGE - 12.0);
        from + (log - self.first) / (self.last - self.first) * (to - from)
    }

    /// The decades that are labelled.
    pub(super) fn ticks(&self) -> impl Iterator<Item = i32> {
        let (first, last) = (self.first as i32, self.last as i32);
        let step = ((last - first) / 8 + 1) as usize;
        (first..=last).step_by(step)
    }
}

/// The scale of the ratios, in steps that read well. It need not begin at 0.
pub(super) struct Ratios {
    pub(super) first: f64,
    pub(super) last: f64,
    pub(super) step: f64,
}

impl Ratios {
    /// A scale that holds 1, all of these ratios, and the useful part of their intervals.
    pub(super) fn of(ratios: &[(f64, Option<(f64, f64)>)]) -> Ratios {
        let low = ratios.iter().map(|ratio| ratio.0).fold(1.0, f64::min);
        let high = ratios.iter().map(|ratio| ratio.0).fold(1.0, f64::max);
        // Intervals, up to about the range of the ratios themselves.
        let room = (high - low).max(0.04) * 0.6;
        let intervals = || ratios.iter().filter_map(|ratio| ratio.1);
        let low = intervals().map(|(lo, _)| lo.max(low - room)).fold(low, f64::min);
        let high = intervals().map(|(_, hi)| hi.min(high + room)).fold(high, f64::max);
        let steps = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0];
        let step = steps.into_iter().find(|step| (high - low) / step <= 6.0).unwrap_or(2.0);
        let first = ((low / step).floor() * step).max(0.0);
        Ratios { first, last: ((high / step).ceil() * step).max(first + step), step }
    }

    /// Where a ratio is; what is beyond, at the border.
    pub(super) fn y(&self, ratio: f64) -> f64 {
        let part = (ratio - self.first) / (self.last - self.first);
        BOTTOM - part.clamp(0.0, 1.0) * (BOTTOM - TOP)
    }

    /// Whether a ratio is within.
    pub(super) fn holds(&self, ratio: f64) -> bool {
        (self.first..=self.last).contains(&ratio)
    }

    /// The ratios that are labelled.
    pub(super) fn ticks(&self) -> impl Iterator<Item = f64> {
        let count = ((self.last - self.first) / self.step).round() as u32;
        (0..=count).map(|n| self.first + f64::from(n) * self.step)
    }
}

/// An area that is taken.
#[derive(Clone, Copy)]
pub(super) struct Rect {
    pub(super) left: f64,
    pub(super) top: f64,
    pub(super) right: f64,
    pub(super) bottom: f64,
}

impl Rect {
    pub(super) fn new(left: f64, top: f64, wide: f64, high: f64) -> Rect {
        Rect { left, top, right: left + wide, bottom: top + high }
    }

    pub(super) fn meets(&self, other: &Rect) -> bool {
        self.left < other.right
            && other.left < self.right
            && self.top < other.bottom
            && other.top < self.bottom
    }

    pub(super) fn holds(&self, other: &Rect) -> bool {
        self.left <= other.left
            && other.right <= self.right
            && self.top <= other.top
            && other.bottom <= self.bottom
    }
}

/// `0.01`, `1`, `100`, `10k`, `1M`: a power of ten as an axis has it.
pub(super) fn power_of_ten(n: i32) -> String {
    match n {
        ..0 => format!("{:.*}", n.unsigned_abs() as usize, 10f64.powi(n)),
        0..3 => 10u64.pow(n as u32).to_string(),
        _ => {
            let unit = ["", "k", "M", "G", "T"][(n as usize / 3).min(4)];
            format!("{}{unit}", 10u64.pow((n as u32 % 3).min(2)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_of_ten_read_well() {
        let names: Vec<String> = [-2, 0, 2, 3, 5, 6].map(power_of_ten).into();
        assert_eq!(names, ["0.01", "1", "100", "1k", "100k", "1M"]);
    }

    #[test]
    fn decades_hold_what_they_are_of_and_lie_between_the_edges() {
        for logs in [&[][..], &[0.0], &[2.5], &[-6.0, 12.0], &[3.0, 3.0]] {
            let decades = Decades::of(logs);
            assert!(decades.first < decades.last, "{logs:?}");
            let ends = [decades.x(decades.first), decades.x(decades.last)];
            assert!(LEFT + EDGE < ends[0] && ends[1] < RIGHT - EDGE, "{logs:?}");
            for log in logs {
                assert!((ends[0]..=ends[1]).contains(&decades.x(*log)), "{logs:?}");
            }
            assert!((2..=10).contains(&decades.ticks().count()), "{logs:?}");
        }
    }

    #[test]
    fn a_scale_of_ratios_holds_off_and_what_it_is_of() {
        let wide = Some((-5.0, 9.0));
        for ratios in [&[][..], &[(1.0, None)], &[(0.2, wide), (0.9, None)], &[(4.0, wide)]] {
            let scale = Ratios::of(ratios);
            assert!(scale.holds(1.0) && scale.first >= 0.0, "{ratios:?}");
            assert!(ratios.iter().all(|(ratio, _)| scale.holds(*ratio)), "{ratios:?}");
            assert!((2..=9).contains(&scale.ticks().count()), "{ratios:?}");
            for ratio in [-9.0, 0.0, 1.0, 99.0] {
                assert!((TOP..=BOTTOM).contains(&scale.y(ratio)), "{ratios:?}");
            }
        }
    }
}
