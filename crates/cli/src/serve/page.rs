//! The metrics of a service, in the text format of Prometheus.

use std::fmt::{Display, Write};

/// The type of a metric.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    /// Only grows, until the service restarts. Its name ends in `_total`.
    Counter,
    /// Goes up and down.
    Gauge,
}

/// A page of metrics. Names get the prefix `ringfence_` here.
#[derive(Default)]
pub(crate) struct Page {
    text: String,
}

impl Page {
    /// A metric without labels.
    pub(crate) fn one(&mut self, kind: Kind, name: &str, help: &str, value: impl Display) {
        self.many(kind, name, help, "", [("", value)]);
    }

    /// A metric with a value for each value of a label; `label` is the label's name.
    pub(crate) fn many<L: Display, V: Display>(
        &mut self,
        kind: Kind,
        name: &str,
        help: &str,
        label: &str,
        values: impl IntoIterator<Item = (L, V)>,
    ) {
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        };
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

    /// The page.
    pub(crate) fn into_text(self) -> String {
        self.text
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
        page.one(Kind::Gauge, "up", "Whether it runs.", 1);
        page.many(Kind::Counter, "x_total", "Xs.", "of", [("a", 2), ("b\"\\\n", 3)]);
        assert_eq!(
            page.into_text(),
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
