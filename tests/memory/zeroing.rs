//! With `zero_on_free` nobody gets what a block held: neither another user, nor the driver, nor the engine's allocator.

use super::fixture::{Fixture, MIB};
use super::simulated::Simulated;
use nvbackend::memory::options::{Limit, Spill};
use nvbackend::memory::pool::Pool;
use nvbackend::memory::MemoryOptions;

fn zeroing() -> MemoryOptions {
    MemoryOptions { zero_on_free: true, ..MemoryOptions::default() }
}

fn expect_filled(fixture: &Fixture, address: usize, bytes: usize) {
    let filled = std::mem::take(&mut fixture.device.state().filled);
    let covers = |&(at, size): &(usize, usize)| at <= address && address + bytes <= at + size;
    assert!(filled.iter().any(covers), "{address:#x} + {bytes} is not among {filled:x?}");
}

#[test]
fn blocks_of_a_pool_are_overwritten_however_they_go() {
    for pooling in [true, false] {
        let fixture = Fixture::new(1 << 30, MemoryOptions { pooling, ..zeroing() });
        let stream = fixture.stream(0);
        let pool = Pool::new(&fixture.manager, "secrets").expect("a pool");
        for bytes in [4096, 3 * MIB] {
            let freed = pool.allocate(bytes, stream.raw()).expect("a block");
            pool.free(freed, stream.raw()).expect("a live block");
            expect_filled(&fixture, freed as usize, bytes);
            let cleared = pool.allocate(bytes, stream.raw()).expect("a block");
            assert_eq!(pool.clear().expect("an idle device"), 1);
            expect_filled(&fixture, cleared as usize, bytes);
        }
        let left = pool.allocate(4096, stream.raw()).expect("a block");
        drop(pool);
        expect_filled(&fixture, left as usize, 4096);
    }
}

#[test]
fn memory_of_the_host_is_overwritten_before_it_goes() {
    for spill in [Spill::Pinned, Spill::Managed] {
        let limit = Limit::Bytes(64 << 20);
        let fixture = Fixture::new(1 << 30, MemoryOptions { spill, limit, ..zeroing() });
        let stream = fixture.stream(0);
        let device = fixture.allocate(64 * MIB, &stream);
        let spilled = fixture.allocate(5 * MIB, &stream);
        let pinned = fixture.manager.allocate_pinned(4096).expect("host memory");
        let managed = fixture.manager.allocate_managed(4096).expect("unified memory");
        for (block, bytes) in [(spilled, 5 * MIB), (pinned, 4096), (managed, 4096), (device, 64 * MIB)] {
            fixture.device.work(stream.raw(), block as usize, bytes, 1000);
            fixture.free(block, &stream);
            expect_filled(&fixture, block as usize, bytes);
        }
    }
}

#[test]
fn host_memory_stays_while_its_users_cannot_be_waited_for() {
    let fixture = Fixture::over(Simulated::new(1 << 30), zeroing());
    let stream = fixture.stream(0);
    let pinned = fixture.manager.allocate_pinned(MIB).expect("host memory");
    fixture.device.work(stream.raw(), pinned as usize, MIB, 1000);
    fixture.device.state().untold_captures = 1;
    fixture.free(pinned, &stream);
    assert_eq!(fixture.device.mapped_bytes(), MIB, "waiting was refused");
    let other = fixture.manager.allocate_pinned(MIB).expect("host memory");
    fixture.free(other, &stream);
    assert_eq!(fixture.device.mapped_bytes(), 0, "both went with the next");
    let last = fixture.manager.allocate_pinned(MIB).expect("host memory");
    fixture.device.state().untold_captures = 1;
    fixture.free(last, &stream);
    let device = fixture.device.clone();
    drop((stream, fixture));
    device.expect_nothing_left();
}
