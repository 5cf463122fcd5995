//! Each layer alone, ours and tower's, per call on the in-memory service: one caller, one thread.

mod support;

use criterion::{BenchmarkGroup, Criterion, measurement::WallTime};

use support::{
    callers::{Callers, Clock},
    stacks::{self, Callable, Visit},
    wire::{Ask, Plain, Wire},
};

struct Group<'a, 'b> {
    on: &'a Callers,
    group: &'a mut BenchmarkGroup<'b, WallTime>,
}

impl Visit for Group<'_, '_> {
    fn visit(&mut self, name: &str, service: impl Callable<Ask>, request: Ask) {
        let on = self.on;
        self.group.bench_function(name, |b| b.iter_custom(|calls| on.run(&service, &request, 1, calls as usize)));
    }
}

fn layers(c: &mut Criterion) {
    // With one thread it is the same time, without what others take of the machine.
    let on = Callers::new(1, Clock::Processor);
    let _in_runtime = on.enter();
    let mut group = c.benchmark_group("layer");
    stacks::each_layer(&Wire::new(2), &mut Group { on: &on, group: &mut group });
    group.finish();
}

/// The limit alone around the least of services, at every number of callers.
fn limiters(c: &mut Criterion) {
    for threads in [1, 2] {
        let on = Callers::new(threads, Clock::Wall);
        let _in_runtime = on.enter();
        let mut group = c.benchmark_group(format!("limiter/{threads}t"));
        for callers in [1, 8, 64, 512] {
            plain(&mut group, &on, "plain", &Plain(2), callers);
            plain(&mut group, &on, "aimd", &stacks::limiter(stacks::SLOTS, 2), callers);
            plain(&mut group, &on, "ConcurrencyLimit", &stacks::concurrency_limit(stacks::SLOTS, 2), callers);
        }
        group.finish();
    }
}

fn plain(
    group: &mut BenchmarkGroup<'_, WallTime>,
    on: &Callers,
    name: &str,
    service: &impl Callable<u64>,
    callers: usize,
) {
    group.bench_function(format!("{name}/{callers}"), |b| {
        b.iter_custom(|calls| support::per_call(calls, callers, |each| on.run(service, &1, callers, each)))
    });
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    layers(&mut criterion);
    limiters(&mut criterion);
    criterion.final_summary();
}
