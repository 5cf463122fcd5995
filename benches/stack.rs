//! The whole stack and tower's parts, per call on the in-memory service, at every number of callers, threads and orgs; and
//! the stack with many waiters.

mod support;

use criterion::{BenchmarkGroup, Criterion, measurement::WallTime};

use support::{
    callers::{Callers, Clock},
    stacks::{self, Callable},
    wire::{Ask, Wire, request, request_of_family},
};

fn stack(c: &mut Criterion) {
    for threads in [1, 2] {
        let on = Callers::new(threads, Clock::Wall);
        let _in_runtime = on.enter();
        for orgs in [3, 32] {
            let mut group = c.benchmark_group(format!("stack/{threads}t/{orgs} orgs"));
            for callers in [1, 8, 64, 512] {
                call(&mut group, &on, "ours", &stacks::ours(orgs, Wire::new(2)), &request_of_family(), callers);
                call(&mut group, &on, "tower", &stacks::tower(orgs, Wire::new(2)), &request(), callers);
            }
            group.finish();
        }
    }
}

fn waiters(c: &mut Criterion) {
    let on = Callers::new(1, Clock::Wall);
    let mut group = c.benchmark_group("waiters");
    for callers in [512, 2_048, 8_192] {
        call(&mut group, &on, "ours", &stacks::ours(3, Wire::new(2)), &request_of_family(), callers);
        call(&mut group, &on, "wire", &Wire::new(2), &request(), callers);
    }
    group.finish();
}

fn call(
    group: &mut BenchmarkGroup<'_, WallTime>,
    on: &Callers,
    name: &str,
    service: &impl Callable<Ask>,
    request: &Ask,
    callers: usize,
) {
    group.bench_function(format!("{name}/{callers}"), |b| {
        b.iter_custom(|calls| support::per_call(calls, callers, |each| on.run(service, request, callers, each)))
    });
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    stack(&mut criterion);
    waiters(&mut criterion);
    criterion.final_summary();
}
