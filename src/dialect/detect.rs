//! Every dialect at once.

use std::time::SystemTime;

use http::HeaderMap;

use super::{Clock, ReadQuota, Reading, Readings, Resource, anthropic, azure, plain};
#[cfg(feature = "ietf")]
use super::{Ietf, ietf};

/// All dialects at once, answer by answer: the default.
///
/// Where an answer speaks several, the [stricter](Reading::stricter) counts. What was read of one answer is forgotten with it, so a
/// run may begin in one dialect and go on in another.
///
/// One pass over the headers, in which most of them are told by their first letter; nothing is allocated, but for the structured
/// fields of the IETF, where an answer has them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Detect;

impl ReadQuota for Detect {
    fn read(&self, headers: &HeaderMap, wall: Option<SystemTime>) -> Readings {
        let clock = Clock { headers, wall };
        // Anthropic's go straight into place.
        let mut readings = Readings::default();
        // Most answers speak one dialect, so what the others take is made when it is needed.
        let mut azure: Option<azure::Said> = None;
        let mut plain: Option<Reading> = None;
        #[cfg(feature = "ietf")]
        let mut is_ietf = false;
        for (name, value) in headers {
            let name = name.as_str();
            match name.as_bytes().first() {
                Some(b'a') => {
                    if let Some((resource, figure)) = anthropic::place(name) {
                        readings.entry(resource).note(figure, value, clock);
                    }
                }
                Some(b'x') => {
                    if let Some(figure) = plain::figure(name) {
                        plain.get_or_insert_default().note(figure, value, clock);
                    } else if let Some(name) = azure::after_prefix(name) {
                        azure.get_or_insert_default().note(name, value, clock);
                    }
                }
                Some(b'r') => {
                    if let Some(figure) = plain::figure(name) {
                        plain.get_or_insert_default().note(figure, value, clock);
                    }
                    #[cfg(feature = "ietf")]
                    {
                        is_ietf |= ietf::is_one(name);
                    }
                }
                _ => {}
            }
        }
        if let Some(azure) = azure {
            readings = readings.stricter(azure.read());
        }
        if let Some(plain) = plain {
            let requests = readings.entry(Resource::Requests);
            *requests = requests.stricter(plain);
        }
        #[cfg(feature = "ietf")]
        if is_ietf {
            readings = readings.stricter(Ietf.read(headers, wall));
        }
        readings
    }
}
