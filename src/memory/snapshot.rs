//! The whole state of a manager as JSON, for tools: what it holds, who has which blocks, where they came from, and the
//! trace. `tools/memory_timeline.py` draws it.
//!
//! Each part is consistent in itself; between parts other threads go on.

use super::arena::Arena;
use super::core::Core;
use super::direct::Kind;
use super::ladder::LADDER;
use super::leak::LeakSite;
use super::size_class::{class_bytes, LARGE};
use super::slab::Slab;
use super::statistics::UsageStatistics;
use crate::allocation::{gathered, push, push_if_room};
use crate::error;
use std::collections::BTreeMap;
use std::io::{ErrorKind, Result, Write};
use std::rc::Rc;

/// The format's version, which grows when a reader of the one before would be wrong.
const VERSION: u32 = 1;

/// One run of units, and the blocks in it that are live.
struct SlabView {
    class: usize,
    block_bytes: usize,
    count: u32,
    /// Address and requested bytes.
    live: Vec<(usize, usize)>,
}

/// `device`: its name, for people.
pub fn write(core: &Core, device: &str, out: &mut dyn Write) -> Result<()> {
    let now = core.source.nanoseconds();
    write!(out, "{{\n\"version\": {VERSION},\n\"nanoseconds\": {now},\n\"device\": {},\n", quoted(device))?;
    statistics(core, out)?;
    write!(out, ",\n\"pools\": ")?;
    let mut arenas: Vec<&Arena> = Vec::new();
    for arena in core.arenas().filter(|arena| is_main(core, arena) || arena.name().is_some()) {
        push(&mut arenas, arena, "a snapshot").map_err(lost)?;
    }
    list(out, &arenas, |out, arena| {
        write!(out, "{{\"name\": {}, \"captured\": {}, ", name_of(core, arena), arena.is_captured())?;
        usage(out, &arena.statistics())?;
        write!(out, "}}")
    })?;
    let slabs: Vec<Vec<SlabView>> = gathered(arenas.iter().map(|arena| view(arena)), "a snapshot").map_err(lost)?;
    write!(out, ",\n\"classes\": ")?;
    classes(&slabs, out)?;
    ranges(core, out)?;
    write!(out, ",\n\"blocks\": ")?;
    blocks(core, &arenas, &slabs, out)?;
    write!(out, ",\n\"sites\": ")?;
    list(out, &core.tracker.sites(now).map_err(lost)?, |out, site: &LeakSite| {
        let (bytes, blocks, age) = (site.bytes, site.blocks, site.age_nanoseconds);
        write!(out, "{{\"bytes\": {bytes}, \"blocks\": {blocks}, \"oldest_nanoseconds\": {age}, \"frames\": ")?;
        list(out, site.lines(), |out, frame| write!(out, "{}", quoted(&frame)))?;
        write!(out, "}}")
    })?;
    trace(core, out)?;
    writeln!(out, "\n}}")
}

fn statistics(core: &Core, out: &mut dyn Write) -> Result<()> {
    let all = core.statistics();
    let usage = core.usage();
    write!(out, "\"statistics\": {{")?;
    self::usage(out, &usage)?;
    for (name, value) in [
        ("limit", all.limit),
        ("margin", all.margin),
        ("reserved", all.reserved),
        ("peak_reserved", all.peak_reserved),
        ("cached", all.cached),
        ("free", all.free_pages),
        ("largest_free", all.largest_free),
        ("spilled", all.spilled),
        ("captured", all.captured),
        ("unaccounted", all.unaccounted),
        ("device_free", all.device_free),
        ("device_total", all.device_total),
    ] {
        write!(out, ", \"{name}\": {value}")?;
    }
    write!(out, ", \"fragmentation\": {:.6}}},\n\"recovery_steps\": ", all.fragmentation)?;
    list(out, LADDER.iter().zip(&all.recovery_steps), |out, (step, counts)| {
        let (name, tried, helped) = (step.name(), counts.tried, counts.helped);
        write!(out, "{{\"name\": \"{name}\", \"tried\": {tried}, \"helped\": {helped}}}")
    })
}

fn usage(out: &mut dyn Write, usage: &UsageStatistics) -> Result<()> {
    let UsageStatistics { allocated, peak, blocks, allocations, frees, failures } = usage;
    write!(
        out,
        "\"allocated\": {allocated}, \"peak\": {peak}, \"blocks\": {blocks}, \"allocations\": {allocations}, \
         \"frees\": {frees}, \"failures\": {failures}"
    )
}

/// A list that there is no memory for.
fn lost(error: error::Error) -> std::io::Error {
    std::io::Error::new(ErrorKind::OutOfMemory, error.message)
}

fn is_main(core: &Core, arena: &Arena) -> bool {
    std::ptr::eq(arena, &*core.main)
}

/// The pool's name in quotes; null for blocks that belong to none.
fn name_of(core: &Core, arena: &Arena) -> String {
    match arena.name() {
        Some(name) if !is_main(core, arena) => quoted(&name),
        _ => "null".to_string(),
    }
}

/// Copies what the locks guard, because writing may take long.
fn view(arena: &Arena) -> error::Result<Vec<SlabView>> {
    let (mut slabs, mut result) = (Vec::new(), Ok(()));
    arena.for_each_slab(|slab| {
        if result.is_ok() {
            result = view_slab(slab).and_then(|view| push(&mut slabs, view, "a snapshot"));
        }
    });
    result.map(|()| slabs)
}

fn view_slab(slab: &Slab) -> error::Result<SlabView> {
    let live = (0..slab.count()).filter_map(|index| Some(Ok((slab.address(index), slab.live_bytes(index)?))));
    let (class, block_bytes, count) = (slab.class(), slab.block_bytes(), slab.count());
    Ok(SlabView { class, block_bytes, count, live: gathered(live, "a snapshot")? })
}

fn classes(slabs: &[Vec<SlabView>], out: &mut dyn Write) -> Result<()> {
    let mut classes: BTreeMap<usize, [usize; 4]> = BTreeMap::new();
    for slab in slabs.iter().flatten() {
        let [slabs, blocks, live, requested] = classes.entry(slab.class).or_default();
        *slabs += 1;
        *blocks += slab.count as usize;
        *live += slab.live.len();
        *requested += slab.live.iter().map(|(_, bytes)| bytes).sum::<usize>();
    }
    list(out, classes, |out, (class, [slabs, blocks, live, requested])| {
        let bytes = if class == LARGE { "null".to_string() } else { class_bytes(class).to_string() };
        write!(
            out,
            "{{\"block_bytes\": {bytes}, \"slabs\": {slabs}, \"blocks\": {blocks}, \"live\": {live}, \
             \"requested\": {requested}}}"
        )
    })
}

/// The range of addresses and the memory behind it.
fn ranges(core: &Core, out: &mut dyn Write) -> Result<()> {
    let Some(pages) = &core.pages else { return write!(out, ",\n\"range\": null,\n\"pieces\": []") };
    let (address, bytes) = pages.range();
    let asleep = pages.asleep.load(std::sync::atomic::Ordering::Relaxed);
    write!(out, ",\n\"range\": {{\"address\": {address}, \"bytes\": {bytes}, \"asleep\": {asleep}}},\n\"pieces\": ")?;
    list(out, pages.pieces().map_err(lost)?, |out, (address, bytes)| write!(out, "[{address}, {bytes}]"))
}

fn blocks(core: &Core, arenas: &[&Arena], slabs: &[Vec<SlabView>], out: &mut dyn Write) -> Result<()> {
    let (mut rows, mut complete) = (Vec::new(), true);
    for (arena, slabs) in arenas.iter().zip(slabs) {
        let pool: Rc<str> = name_of(core, arena).into();
        for slab in slabs {
            let kind = if slab.class == LARGE { "large" } else { "small" };
            rows.try_reserve(slab.live.len()).map_err(|_| ErrorKind::OutOfMemory)?;
            rows.extend(slab.live.iter().map(|&(at, bytes)| (at, bytes, slab.block_bytes, kind, pool.clone())));
        }
    }
    core.direct.for_each(|address, block| {
        let kind = match block.kind {
            _ if block.spilled => "spilled",
            Kind::Plain => "plain",
            Kind::Pinned => "pinned",
            Kind::Managed => "managed",
        };
        let pool = arenas.iter().find(|arena| std::ptr::eq(&arena.usage, block.usage));
        let pool = pool.map_or("null".into(), |arena| name_of(core, arena).into());
        complete &= push_if_room(&mut rows, (address, block.bytes, block.origin_bytes, kind, pool));
    });
    if !complete {
        return Err(ErrorKind::OutOfMemory.into());
    }
    write!(out, "{{\"columns\": [\"address\", \"bytes\", \"held\", \"kind\", \"pool\"], \"rows\": ")?;
    list(out, rows, |out, (address, bytes, held, kind, pool)| {
        write!(out, "[{address}, {bytes}, {held}, \"{kind}\", {pool}]")
    })?;
    write!(out, "}}")
}

fn trace(core: &Core, out: &mut dyn Write) -> Result<()> {
    let Some(trace) = &core.trace else { return write!(out, ",\n\"trace\": null") };
    let (events, written) = trace.read().ok_or(ErrorKind::OutOfMemory)?;
    write!(out, ",\n\"trace\": {{\"written\": {written}, \"pools\": ")?;
    list(out, trace.pools(), |out, name| write!(out, "{}", quoted(&name)))?;
    write!(
        out,
        ", \"columns\": [\"nanoseconds\", \"kind\", \"address\", \"bytes\", \"stream\", \"reserved\", \"pool\"], \
         \"rows\": "
    )?;
    list(out, events, |out, event| {
        let (at, kind, address) = (event.nanoseconds, event.kind.name(), event.address);
        let pool = event.pool;
        write!(out, "[{at}, \"{kind}\", {address}, {}, {}, {}, {pool}]", event.bytes, event.stream, event.reserved)
    })?;
    write!(out, "}}")
}

fn list<T>(
    out: &mut dyn Write,
    items: impl IntoIterator<Item = T>,
    mut each: impl FnMut(&mut dyn Write, T) -> Result<()>,
) -> Result<()> {
    write!(out, "[")?;
    for (i, item) in items.into_iter().enumerate() {
        write!(out, "{}", if i == 0 { "\n" } else { ",\n" })?;
        each(out, item)?;
    }
    write!(out, "]")
}

fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            control if (control as u32) < 0x20 => quoted += &format!("\\u{:04x}", control as u32),
            other => quoted.push(other),
        }
    }
    quoted + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_as_json_wants_it() {
        assert_eq!(quoted("a\"b\\c\nd é"), "\"a\\\"b\\\\c\\u000ad é\"");
    }

    #[test]
    fn lists_have_commas_between_their_items() {
        let mut out = Vec::new();
        list(&mut out, [1, 2], |out, item| write!(out, "{item}")).unwrap();
        list(&mut out, [] as [u8; 0], |out, item| write!(out, "{item}")).unwrap();
        assert_eq!(out, b"[\n1,\n2][]");
    }
}
