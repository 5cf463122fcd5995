//! The input, opened: a file after all of it was checked and compared with what an earlier run has left, a stream from its first line.

use std::{fs::File, io, path::Path, time::SystemTime};

use tower_quota::org::{Dialect, Family};

use crate::{
    Failure,
    args::{Args, is_standard},
    can_hold,
    claim::Claim,
    folder_of,
    forecast::Work,
    input::{self, BadInput, Item, Items, Reading},
    resume::{Resume, Wish},
    words,
};

/// Gives the next item; may block.
pub(crate) type Next = Box<dyn FnMut() -> Result<Option<Item>, BadInput> + Send>;

/// The input, opened, and a file also checked.
pub(crate) struct Source {
    /// `None` where there is not a single good line.
    pub(crate) dialect: Option<Dialect>,
    /// Those of a file; of a stream that of the first line.
    pub(crate) families: Vec<Family>,
    /// How many items a file has.
    pub(crate) total: Option<u64>,
    /// What they ask for.
    pub(crate) work: Option<Work>,
    /// All this for people.
    pub(crate) what: String,
    pub(crate) next: Next,
    /// What an earlier run has left.
    pub(crate) resume: Resume,
}

/// What tells whether a file has been changed.
fn looks(path: &Path) -> Option<(u64, SystemTime)> {
    let there = std::fs::metadata(path).ok()?;
    Some((there.len(), there.modified().ok()?))
}

impl Source {
    pub(crate) fn open(args: &Args, input: &Path, reading: &Reading, earlier: Option<&Claim>) -> Result<Self, Failure> {
        let wish = Wish { retry_failed: args.retry_failed, ordered: args.ordered.is_some() };
        let folder = match args.output.as_deref().filter(|output| can_hold(Some(output))) {
            Some(output) => folder_of(output).to_owned(),
            None => std::env::temp_dir(),
        };
        // Only a file can be read twice: a pipe may have a name too.
        if !is_standard(input) && std::fs::metadata(input).is_ok_and(|metadata| metadata.is_file()) {
            let as_it_was = looks(input);
            let mut work = Work::default();
            let (survey, mut sending, resume) =
                Resume::of_file(input, reading, earlier, &folder, wish, |number, body| {
                    work.sample(number, body.as_bytes())
                })?;
            if let Some(left) = resume.sending() {
                work.keep(left, survey.items);
            }
            let (requests, size) = (words::count(survey.items, "request"), words::size(survey.bytes));
            let mut what = format!("{requests}, {size}, from {}", input.display());
            for (family, count) in survey.families.iter().take(8) {
                what.push_str(&format!(", {count} {family}"));
            }
            let mut items = input::open(input, reading)?;
            let file = input.to_owned();
            let next = Box::new(move || {
                while !sending.is_over() {
                    match items.next_item()? {
                        Some(_) if !sending.wants() => {}
                        Some(item) => return Ok(Some(item)),
                        None => break,
                    }
                }
                if looks(&file) == as_it_was {
                    return Ok(None);
                }
                let problem = "it was changed while it was read: begin again with it as it is to be".to_owned();
                Err(BadInput { file: file.display().to_string(), place: None, problem })
            });
            let families = survey.families.into_keys().collect();
            return Ok(Source {
                dialect: survey.form,
                families,
                total: Some(survey.items),
                work: Some(work),
                what,
                next,
                resume,
            });
        }
        let name = if is_standard(input) { "standard input".to_owned() } else { input.display().to_string() };
        let source = if is_standard(input) {
            input::unpacked(io::stdin(), input)
        } else {
            File::open(input).and_then(|file| input::unpacked(file, input))
        };
        let source = source.map_err(|error| Failure(format!("{name}: {error}")))?;
        let resume = Resume::of_stream(earlier, &folder, wish)?;
        let mut items = Items::new(source, &name, reading.clone());
        let first = items.next_placed()?;
        let families = first.iter().map(|(item, _)| item.family.clone()).collect();
        let dialect = first.as_ref().and_then(|_| items.dialect());
        let next = Box::new(resume.new_items(items, first));
        Ok(Source {
            dialect,
            families,
            total: None,
            work: None,
            what: format!("unknown requests from {name}"),
            next,
            resume,
        })
    }
}
