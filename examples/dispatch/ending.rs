//! What an outcome means for the next run.

use tower_quota::outcome::Class;

/// How an id has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Ok,
    /// Asking again brings the same.
    Terminal,
    /// Asking again may bring an answer.
    Redrivable,
}

impl Ending {
    /// By the outcome's word. One that is not known, `deadline` and `cancelled` among them, is no class's: nothing speaks
    /// against asking again.
    pub(crate) fn of(outcome: &str) -> Self {
        if outcome == "ok" {
            return Ending::Ok;
        }
        let last = |class: &Class| !class.implies().redrivable && class.name() == outcome;
        if Class::ALL.iter().any(last) { Ending::Terminal } else { Ending::Redrivable }
    }
}
