//! Which page has which tokens of which sequence, and who shares it: lists on the host alone. Nothing is allocated after
//! `new`.

use super::zeros;
use crate::allocation::{collected, filled};
use crate::error::{Error, Result, Status};
use std::ops::Range;

/// No page.
pub const NONE: i32 = -1;

pub struct Pages {
    page_tokens: usize,
    columns: usize,
    /// [sequences, columns]
    table: Vec<i32>,
    /// Sequences that have the page.
    users: Vec<u32>,
    /// The last one is taken first.
    free: Vec<u32>,
}

/// Pages that a sequence is to take: the entries from `first` on, of which the first takes the place of a shared page.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Taking {
    pub columns: (usize, usize),
    /// The shared page whose tokens are copied.
    pub copied: Option<u32>,
}

impl Pages {
    pub fn new(page_tokens: usize, sequences: usize, columns: usize, pages: usize) -> Result<Pages> {
        let table = filled(NONE, sequences * columns, "the page table of a KV cache")?;
        let users = zeros(pages, "the pages of a KV cache")?;
        let free = collected((0..pages as u32).rev(), "the pages of a KV cache")?;
        Ok(Pages { page_tokens, columns, table, users, free })
    }

    pub fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    pub fn total(&self) -> usize {
        self.users.len()
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    pub fn shared(&self) -> usize {
        self.users.iter().filter(|&&users| users > 1).count()
    }

    /// A sequence's entries.
    pub fn row(&self, sequence: usize) -> &[i32] {
        &self.table[sequence * self.columns..][..self.columns]
    }

    pub fn entries(&self, sequence: usize, columns: Range<usize>) -> &[i32] {
        &self.row(sequence)[columns]
    }

    fn entry(&mut self, sequence: usize, column: usize) -> &mut i32 {
        &mut self.table[sequence * self.columns + column]
    }

    /// What a sequence of `held` tokens takes to have `tokens`; an error names it, the pages that it needs and those that
    /// are free.
    pub fn plan(&self, sequence: usize, held: usize, tokens: usize) -> Result<Taking> {
        let (have, want) = (held.div_ceil(self.page_tokens), tokens.div_ceil(self.page_tokens));
        let last = (!held.is_multiple_of(self.page_tokens)).then(|| self.row(sequence)[have - 1] as u32);
        let copied = last.filter(|&page| self.users[page as usize] > 1);
        let taking = Taking { columns: (have - usize::from(copied.is_some()), want), copied };
        self.expect_free(sequence, taking.columns.1 - taking.columns.0, tokens)?;
        Ok(taking)
    }

    pub fn expect_free(&self, sequence: usize, pages: usize, tokens: usize) -> Result<()> {
        if pages <= self.free.len() {
            return Ok(());
        }
        Err(Error::new(
            Status::OutOfMemory,
            format!(
                "the KV cache is full: sequence {sequence} needs {pages} more pages for {tokens} tokens; {} of {} are free",
                self.free.len(),
                self.users.len()
            ),
        )
        .with_limit(pages as u64, self.free.len() as u64)
        .with_advice("release or truncate a sequence, or create the cache with more pages"))
    }

    /// Puts free pages at the entries of a plan, which `undo` gives back.
    pub fn take(&mut self, sequence: usize, taking: &Taking) {
        for column in taking.columns.0..taking.columns.1 {
            let page = self.free.pop().expect("the plan has seen that enough are free");
            self.users[page as usize] = 1;
            *self.entry(sequence, column) = page as i32;
        }
        if let Some(page) = taking.copied {
            self.users[page as usize] -= 1;
        }
    }

    pub fn undo(&mut self, sequence: usize, taking: &Taking) {
        for column in (taking.columns.0..taking.columns.1).rev() {
            self.drop_entry(sequence, column);
        }
        if let Some(page) = taking.copied {
            self.users[page as usize] += 1;
            *self.entry(sequence, taking.columns.0) = page as i32;
        }
    }

    fn drop_entry(&mut self, sequence: usize, column: usize) {
        let page = std::mem::replace(self.entry(sequence, column), NONE) as u32;
        let users = &mut self.users[page as usize];
        *users -= 1;
        if *users == 0 {
            self.free.push(page);
        }
    }

    /// Gives the pages of the columns back, the last first.
    pub fn give(&mut self, sequence: usize, columns: Range<usize>) {
        columns.rev().for_each(|column| self.drop_entry(sequence, column));
    }

    /// Lets `to` have the first `pages` of `from` too.
    pub fn share(&mut self, from: usize, to: usize, pages: usize) {
        for column in 0..pages {
            let page = self.row(from)[column];
            self.users[page as usize] += 1;
            *self.entry(to, column) = page;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn grow(pages: &mut Pages, sequence: usize, held: usize, tokens: usize) -> Taking {
        let taking = pages.plan(sequence, held, tokens).unwrap();
        pages.take(sequence, &taking);
        taking
    }

    #[test]
    fn a_shared_page_is_copied_before_it_is_appended_to() {
        let mut pages = Pages::new(4, 2, 4, 5).unwrap();
        assert_eq!(grow(&mut pages, 0, 0, 6), Taking { columns: (0, 2), copied: None });
        pages.share(0, 1, 2);
        assert_eq!((pages.shared(), pages.free()), (2, 3));
        // Sequence 1 holds 6 tokens of two pages, the second of which has room.
        let taking = grow(&mut pages, 1, 6, 7);
        assert_eq!(taking, Taking { columns: (1, 2), copied: Some(1) });
        assert_eq!((pages.row(0), pages.row(1)), (&[0, 1, -1, -1][..], &[0, 2, -1, -1][..]));
        pages.undo(1, &taking);
        assert_eq!((pages.row(1), pages.shared(), pages.free()), (&[0, 1, -1, -1][..], 2, 3));
        // A whole page is never appended to.
        assert_eq!(pages.plan(1, 4, 8).unwrap().copied, None);
    }

    #[test]
    fn a_full_cache_names_sequence_and_pages() {
        let mut pages = Pages::new(3, 4, 8, 3).unwrap();
        grow(&mut pages, 0, 0, 4);
        let error = pages.plan(2, 0, 7).unwrap_err();
        assert_eq!((error.status, pages.free()), (Status::OutOfMemory, 1));
        assert!(error.message.contains("sequence 2 needs 3 more pages for 7 tokens; 1 of 3 are free"), "{error}");
    }

    proptest! {
        /// Whatever sequences do, every page is free or has as many users as entries name it.
        #[test]
        fn every_page_is_free_or_used(steps in proptest::collection::vec((0usize..4, 0usize..4, 0usize..40), 1..80)) {
            let (sequences, page_tokens) = (4, 3);
            let mut pages = Pages::new(page_tokens, sequences, 14, 16).unwrap();
            let mut held = [0usize; 4];
            for (action, sequence, tokens) in steps {
                match action {
                    0 | 1 if tokens > held[sequence] => if let Ok(taking) = pages.plan(sequence, held[sequence], tokens) {
                        pages.take(sequence, &taking);
                        if action == 0 { held[sequence] = tokens } else { pages.undo(sequence, &taking) }
                    },
                    2 => {
                        let kept = tokens.min(held[sequence]);
                        pages.give(sequence, kept.div_ceil(page_tokens)..held[sequence].div_ceil(page_tokens));
                        held[sequence] = kept;
                    }
                    3 => {
                        let to = tokens % sequences;
                        if held[to] == 0 && to != sequence {
                            let whole = held[sequence] / page_tokens;
                            pages.share(sequence, to, whole);
                            held[to] = whole * page_tokens;
                        }
                    }
                    _ => {}
                }
                let mut users = vec![0; pages.total()];
                for (sequence, held) in held.iter().enumerate() {
                    let row = pages.row(sequence);
                    let count = held.div_ceil(page_tokens);
                    prop_assert!(row[..count].iter().all(|&page| page >= 0) && row[count..].iter().all(|&page| page == NONE));
                    row[..count].iter().for_each(|&page| users[page as usize] += 1);
                }
                prop_assert_eq!(&users, &pages.users);
                let free = users.iter().filter(|&&users| users == 0).count();
                prop_assert_eq!(free, pages.free());
            }
        }
    }
}
