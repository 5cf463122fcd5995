//! Records in the journal's file: two more tables in it, written by its one writer.

use bytes::Bytes;
use redb::{Database, Error, ReadableDatabase, ReadableTable, TableDefinition, TableError};

use super::{BatchChange, BatchRows, BatchStore, Token};
use crate::journal::{FileAsk, FileStore};

/// Records by their tokens.
const BATCHES: TableDefinition<[u8; 16], &[u8]> = TableDefinition::new("batches");
/// The bodies of rows by token and place.
const ROWS: TableDefinition<([u8; 16], u32), &[u8]> = TableDefinition::new("batch rows");

/// Beside the journal's entries, in the same file. Where that is damaged and has to be salvaged, entries are; records of batches are not.
impl BatchStore for FileStore {
    type Load = FileAsk<Vec<(Token, Bytes)>>;
    type Row = FileAsk<Option<Bytes>>;
    type Write = FileAsk<()>;

    fn load(&self) -> Self::Load {
        self.ask(|database| {
            let reading = database.begin_read()?;
            let Some(batches) = there(reading.open_table(BATCHES))? else { return Ok(vec![]) };
            let mut found = vec![];
            for record in batches.iter()? {
                let (token, record) = record?;
                found.push((Token::from_bytes(token.value()), Bytes::copy_from_slice(record.value())));
            }
            Ok(found)
        })
    }

    fn row(&self, token: Token, place: u32) -> Self::Row {
        self.ask(move |database| {
            let reading = database.begin_read()?;
            let Some(rows) = there(reading.open_table(ROWS))? else { return Ok(None) };
            Ok(rows.get((*token.as_bytes(), place))?.map(|body| Bytes::copy_from_slice(body.value())))
        })
    }

    fn write(&self, change: BatchChange) -> Self::Write {
        self.ask(move |database| write(database, &change))
    }
}

/// All of it or nothing, and on the disk.
fn write(database: &Database, BatchChange { token, record, rows }: &BatchChange) -> Result<(), Error> {
    let token = *token.as_bytes();
    let mut writing = database.begin_write()?;
    writing.set_quick_repair(true);
    {
        let mut batches = writing.open_table(BATCHES)?;
        match record {
            Some(record) => batches.insert(token, &**record)?,
            None => batches.remove(token)?,
        };
        let mut bodies = writing.open_table(ROWS)?;
        if !matches!(rows, BatchRows::Keep) {
            bodies.retain_in((token, 0)..=(token, u32::MAX), |_, _| false)?;
        }
        if let BatchRows::Put(rows) = rows {
            for (place, body) in (0u32..).zip(rows) {
                bodies.insert((token, place), &**body)?;
            }
        }
    }
    writing.commit()?;
    Ok(())
}

/// A table that nobody has written to is none.
fn there<T>(opened: Result<T, TableError>) -> Result<Option<T>, Error> {
    match opened {
        Ok(table) => Ok(Some(table)),
        Err(TableError::TableDoesNotExist(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}
