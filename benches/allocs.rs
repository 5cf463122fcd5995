//! Allocations and bytes a call, of each layer alone and of the whole stack, beside tower's: steadier than any time.
//!
//! ```text
//! cargo bench --bench allocs               all
//! cargo bench --bench allocs -- stack      those whose name contains every one of these
//! ```
//!
//! What the callers and the provider allocate without any layer (the first line) is taken off the others.

mod support;

use std::alloc::System;

use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

use support::{
    callers::{Callers, Clock},
    stacks::{self, Callable, Visit},
    wire::{Ask, Wire, request, request_of_family},
};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

const CALLS: usize = 20_000;

fn main() {
    let filters: Vec<_> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let on = Callers::new(1, Clock::Wall);
    let _in_runtime = on.enter();
    println!("{:<36} {:>8} {:>10} {:>10}", "a call", "allocs", "reallocs", "bytes");
    let mut table = Table { on: &on, filters, floor: None };
    stacks::each_layer(&Wire::new(2), &mut table);
    for callers in [64, 512] {
        table.row(
            &format!("whole stack, {callers} callers"),
            &stacks::ours(3, Wire::new(2)),
            &request_of_family(),
            callers,
        );
        table.row(&format!("tower's parts, {callers} callers"), &stacks::tower(3, Wire::new(2)), &request(), callers);
    }
}

struct Table<'a> {
    on: &'a Callers,
    filters: Vec<String>,
    floor: Option<[f64; 3]>,
}

impl Visit for Table<'_> {
    fn visit(&mut self, name: &str, service: impl Callable<Ask>, request: Ask) {
        self.row(name, &service, &request, 1);
    }
}

impl Table<'_> {
    fn row(&mut self, name: &str, service: &impl Callable<Ask>, request: &Ask, callers: usize) {
        if self.floor.is_some() && !self.filters.iter().all(|filter| name.contains(filter.as_str())) {
            return;
        }
        let each = CALLS / callers;
        self.on.run(service, request, callers, each);
        // What a run costs besides its calls is the same in a short one.
        let few = self.count(service, request, callers, 1);
        let all = self.count(service, request, callers, 1 + each);
        let mut counts = [0, 1, 2].map(|i| (all[i] - few[i]) / (each * callers) as f64);
        match &self.floor {
            None => self.floor = Some(counts),
            Some(floor) => counts.iter_mut().zip(floor).for_each(|(count, floor)| *count -= floor),
        }
        let [allocations, reallocations, bytes] = counts;
        println!("{name:<36} {allocations:>8.2} {reallocations:>10.2} {bytes:>10.0}");
    }

    fn count(&self, service: &impl Callable<Ask>, request: &Ask, callers: usize, each: usize) -> [f64; 3] {
        let region = Region::new(ALLOCATOR);
        self.on.run(service, request, callers, each);
        let change = region.change();
        [change.allocations, change.reallocations, change.bytes_allocated].map(|count| count as f64)
    }
}
