//! The metrics of a service, in the text format of Prometheus.

use std::fmt::{Display, Write};

/// A page of metrics. Names get the prefix `ringfence_` here. One whose name ends in `_total` is a
/// counter, which only grows until the service restarts; any other is a gauge.
#[derive(Default)]
pub(crate) struct Page {
    pub(super) text: String,
}

impl Page {
    /// A metric without labels.
    pub(crate) fn one(&mut self, name: &str, help: &str, value: impl Display) {
        self.many(name, help, "", [("", value)]);
    }

    /// A metric with a value for each value of a label; `label` is the label's name.
    pub(crate) fn many<L: Display, V: Display>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl IntoIterator<Item = (L, V)>,
    ) {
        let kind = if name.ends_with("_total") { "counter" } else { "gauge" };
        let _ = writeln!(self.text, "# HELP ringfence_{name} {help}");
        let _ = writeln!(self.text, "# TYPE ringfence_{name} {kind}");
        for (of, value) in values {
            let _ = match label {
                "" => writeln!(self.text, "ringfence_{name} {value}"),
                label => {
                    let of = escaped(&of.to_string());
                    writeln!(self.text, "ringfence_{name}{{{label}=\"{of}\"}} {value}")
                }
            };
        }
    }
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_stand_as_the_format_wants_them() {
        let mut page = Page::default();
        page.one("up", "Whether it runs.", 1);
        page.many("x_total", "Xs.", "of", [("a", 2), ("b\"\\\n", 3)]);
        assert_eq!(
            page.text,
            "# HELP ringfence_up Whether it runs.\n\
             # TYPE ringfence_up gauge\n\
             ringfence_up 1\n\
             # HELP ringfence_x_total Xs.\n\
             # TYPE ringfence_x_total counter\n\
             ringfence_x_total{of=\"a\"} 2\n\
             ringfence_x_total{of=\"b\\\"\\\\\\n\"} 3\n"
        );
    }
}
