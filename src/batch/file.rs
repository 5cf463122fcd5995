//! Records in the journal's file, written by its one writer.

use bytes::Bytes;

use super::{BatchChange, BatchRows, BatchStore, Token};
use crate::journal::{FileAsk, FileStore};

/// Beside the journal's entries, in the same file, and sealed as they are: where it is damaged and has to be salvaged, records and bodies are
/// saved too. Each record stands there twice, so that one flipped bit costs none.
impl BatchStore for FileStore {
    type Load = FileAsk<Vec<(Token, Bytes)>>;
    type Row = FileAsk<Option<Bytes>>;
    type Write = FileAsk<()>;

    fn load(&self) -> Self::Load {
        self.batches(|token, record| (Token::from_bytes(token), record))
    }

    fn row(&self, token: Token, place: u32) -> Self::Row {
        self.batch_body(*token.as_bytes(), place)
    }

    fn write(&self, BatchChange { token, record, rows }: BatchChange) -> Self::Write {
        let bodies = match rows {
            BatchRows::Keep => None,
            BatchRows::Put(rows) => Some(rows),
            BatchRows::Drop => Some(vec![]),
        };
        self.change_batch(*token.as_bytes(), record, bodies)
    }
}
